"""The web UI's files at `/`: read once, served with a strict Content-Security-Policy."""

import hashlib
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request, Response

CONNECT = "connect-src 'self'"
CSP = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        CONNECT,
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
MAX_FILE_BYTES = 8 << 20


def find_webui(given: Path | None) -> Path | None:
    """Return the given, the installed, or the repository's directory; None if it has no page."""
    package = Path(__file__).resolve().parents[2]
    candidates = [given] if given is not None else [package / "webui", package.parents[1] / "webui"]
    for folder in candidates:
        if (folder / "index.html").is_file():
            return folder
    return None


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


class WebUi:
    """Files by URL path, read at start; no other path is ever opened."""

    def __init__(self, folder: Path | None, mcp_origins: Sequence[str] = ()) -> None:
        """`mcp_origins`: the origins besides its own that the page may call, for MCP servers."""
        self.assets: dict[str, Asset] = {}
        connect = " ".join((CONNECT, *mcp_origins))
        self.headers = {**HEADERS, "Content-Security-Policy": CSP.replace(CONNECT, connect)}
        if folder is None:
            return
        for file in sorted(folder.rglob("*")):
            relative = file.relative_to(folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            if hidden or file.is_symlink() or not file.is_file():
                continue
            if file.stat().st_size > MAX_FILE_BYTES:
                continue
            content = file.read_bytes()
            if relative.as_posix() == "index.html":
                mark = b'<meta name="mcp-origins" content="'
                content = content.replace(CONNECT.encode(), connect.encode())
                content = content.replace(mark, mark + " ".join(mcp_origins).encode())
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            if file.suffix in (".js", ".mjs"):
                kind = "text/javascript"
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            asset = Asset(content, kind, etag)
            self.assets[f"/{relative.as_posix()}"] = asset
            if relative.as_posix() == "index.html":
                self.assets["/"] = asset

    def has(self, method: str, path: str) -> bool:
        return method in ("GET", "HEAD") and path in self.assets

    async def serve(self, request: Request) -> Response:
        asset = self.assets[request.url.path]
        headers = {**self.headers, "ETag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, headers=headers, media_type=asset.media_type)
