"""The HTTP client of `llaisys bench serve`: the URL of a server, and exchanges with it."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from llaisys.common.http_client import Header, HttpClient, HttpError
from llaisys.common.validation import check_url

READ_LIMIT = 64 << 20  # bytes of one response body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a server's base URL, without a trailing /v1."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, insecure: bool = False) -> Self:
        whole = url if "://" in url else f"http://{url}"
        is_tls, host, port, path = check_url("url", whole, label="--url")
        context = ssl.create_default_context() if is_tls else None
        if context is not None and insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return cls(host, port, path.rstrip("/").removesuffix("/v1"), context)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class ConnectionPool:
    """Exchanges with an endpoint over keep-alive connections; `headers`: of every request."""

    def __init__(self, endpoint: Endpoint, headers: dict[str, str]) -> None:
        self._path = endpoint.path
        self._client = HttpClient(endpoint.host, endpoint.port, endpoint.tls)
        every = {"Host": endpoint.authority, **headers, "Content-Type": "application/json"}
        self._headers: list[Header] = [(k.encode(), v.encode()) for k, v in every.items()]

    async def exchange(
        self, method: str, path: str, body: bytes, on_body: Callable[[int, bytes], None]
    ) -> int:
        """Send a request, pass (status, part of the body) to `on_body` as it arrives, return the
        status at the end. Cancellation (a timeout) closes the connection."""
        target = f"{self._path}{path}".encode()
        answer = await self._client.send(method, target, self._headers, body)
        size = 0
        try:
            async for piece in answer.body():
                size += len(piece)
                if size > READ_LIMIT:
                    raise HttpError(f"a response of more than {READ_LIMIT} bytes")
                on_body(answer.status, piece)
        finally:
            answer.close()
        return answer.status

    async def fetch(self, path: str) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        status = await self.exchange("GET", path, b"", lambda _, piece: pieces.append(piece))
        return status, b"".join(pieces)

    def close(self) -> None:
        self._client.close()
