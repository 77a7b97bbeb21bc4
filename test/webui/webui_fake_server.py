"""A fake server for the web page. Tests set its answers, their timing and how they end.

It uses the standard library only, so that the page can be viewed without an engine:

    python test/webui/webui_fake_server.py        serve the page with echo answers
"""

from __future__ import annotations

import json
import mimetypes
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WEBUI = Path(__file__).resolve().parents[2] / "webui"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MODEL = "SmolLM2-135M-Instruct"


class Gate:
    """Holds back the pieces of an answer until the test releases them."""

    def __init__(self, free: int = 0) -> None:
        self._pieces = threading.Semaphore(free)
        self._open = threading.Event()

    def release(self, pieces: int = 1) -> None:
        self._pieces.release(pieces)

    def open(self) -> None:
        self._open.set()
        self._pieces.release()

    def wait(self) -> None:
        if not self._open.is_set():
            self._pieces.acquire(timeout=30)


@dataclass
class Reply:
    """An answer. With a `status` other than 200 the response is `error`."""

    pieces: list[str | dict[str, Any]]  # texts, or deltas of a chat
    finish: str = "stop"
    status: int = 200
    error: str = "rejected"
    retry_after: int | None = None
    gate: Gate | None = None  # before every piece
    delay: float = 0.0  # seconds before every piece
    fail_after: int | None = None  # pieces, then an error event
    drop_after: int | None = None  # pieces, then the connection closes
    usage: tuple[int, int] = (42, 32)  # prompt tokens, cached ones
    logprob: float | None = None  # of every piece, with one other token
    gone: threading.Event = field(default_factory=threading.Event)  # the client disconnected
    sent: int = 0

    @classmethod
    def of(cls, text: str, size: int = 4, **fields: Any) -> Reply:
        """`text` in pieces of `size` characters."""
        return cls([text[i : i + size] for i in range(0, len(text), size)], **fields)


class FakeServer(ThreadingHTTPServer):
    """Answers `replies[last user message]`, or an echo. `requests` records every (path, body)."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.replies: dict[str, Reply | list[Reply]] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.sessions: dict[str, dict[str, Any]] = {}
        self.sessions_full = False
        self.api_key: str | None = None
        self.mcp_origins: list[str] = []
        self.model_defaults: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
        self.loading: dict[str, Any] | None = None  # body of /health while the model loads
        self.metrics = {
            "num_requests_running": 2.0,
            "num_requests_waiting": 1.0,
            "kv_cache_usage_perc": 0.25,
            "prefix_cache_queries_total": 200.0,
            "prefix_cache_hits_total": 150.0,
            "spec_decode_num_drafts_total": 20.0,
            "spec_decode_num_draft_tokens_total": 40.0,
            "spec_decode_num_accepted_tokens_total": 30.0,
            'spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"}': 18.0,
            'spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"}': 12.0,
            'spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="2"}': 0.0,
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def start(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def reset(self) -> None:
        self.replies.clear()
        self.requests.clear()
        self.sessions.clear()
        self.sessions_full = False
        self.api_key = None
        self.mcp_origins = []
        self.loading = None

    def reply_to(self, text: str) -> Reply:
        found = self.replies.get(text)
        if isinstance(found, list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found or Reply.of(f"You said: {text}")

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in self.requests if where == path]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def request_id(self) -> str:
        return self.headers.get("X-Request-Id") or "fake-0001"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        file = WEBUI / (path.lstrip("/") or "index.html")
        if file.is_file() and file.parent == WEBUI:
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            kind = "text/javascript" if file.suffix == ".js" else kind
            cached = "no-cache" if file.name == "index.html" else "max-age=600"
            headers = {"Content-Security-Policy": self._permit(CSP), "Cache-Control": cached}
            content = file.read_bytes()
            if file.name == "index.html":
                content = self._permit(content.decode()).encode()
            self._send(200, content, kind, headers)
        elif path == "/health":
            loading = self.server.loading
            status, body = (503, loading) if loading else (200, {"status": "ok"})
            self._send(status, json.dumps(body).encode(), "application/json")
        elif not self._allowed():
            self._refuse(401, "a valid API key is needed: Authorization: Bearer KEY")
        elif self.server.loading:
            self._refuse(503, "the model is still being loaded", 1)
        elif path == "/v1/models":
            card = {"id": MODEL, "object": "model", "max_model_len": 8192}
            card["default_sampling_params"] = self.server.model_defaults
            self._json({"object": "list", "data": [card, {**card, "id": "another-model"}]})
        elif path == "/v1/sessions":
            stored = [{"id": name, **session} for name, session in self.server.sessions.items()]
            self._json({"object": "list", "data": stored})
        elif (name := path.removeprefix("/v1/sessions/")) in self.server.sessions:
            self._json({"id": name, **self.server.sessions[name]})
        elif path == "/metrics":
            labels = '{model_name="m"}'
            lines = [
                f"llaisys:{name}{'' if '{' in name else labels} {value}"
                for name, value in self.server.metrics.items()
            ]
            self._send(200, "\n".join(lines).encode(), "text/plain")
        else:
            self._refuse(404, f"no route {path}")

    def _permit(self, text: str) -> str:
        """`text` with the origins of MCP servers, as the server's option writes them."""
        origins = " ".join(self.server.mcp_origins)
        meta = '<meta name="mcp-origins" content="'
        text = text.replace("connect-src 'self'", f"connect-src 'self' {origins}".strip())
        return text.replace(meta, meta + origins)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.server.requests.append((self.path, body))
        if not self._allowed():
            self._refuse(401, "a valid API key is needed: Authorization: Bearer KEY")
        elif self.path == "/v1/chat/completions":
            users = [m["content"] for m in body["messages"] if m["role"] == "user"]
            resumed = body["messages"][-1]["role"] == "assistant"
            self._answer(self.server.reply_to(("+" if resumed else "") + users[-1]), body)
        else:
            self._refuse(404, f"no route {self.path}")

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.server.requests.append((self.path, body))
        if self.server.sessions_full:
            self._refuse(507, "the sessions are full")
            return
        self.server.sessions[self.path.removeprefix("/v1/sessions/")] = {**body, "updated": 1}
        self._json({})

    def do_DELETE(self) -> None:
        name = self.path.removeprefix("/v1/sessions/")
        if self.server.sessions.pop(name, None) is None:
            self._refuse(404, "there is no such session")
        else:
            self._json({"deleted": True})

    def _allowed(self) -> bool:
        key = self.server.api_key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def _answer(self, reply: Reply, body: dict[str, Any]) -> None:
        if reply.status != 200:
            if reply.gate:
                reply.gate.wait()
            self._refuse(reply.status, reply.error, reply.retry_after)
        elif body.get("stream"):
            self._stream(reply)
        else:
            text = "".join(piece for piece in reply.pieces if isinstance(piece, str))
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": reply.finish}
            self._json({"choices": [choice], "usage": usage(reply)})

    def _stream(self, reply: Reply) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("X-Request-Id", self.request_id)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in self._events(reply):
                data = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            reply.gone.set()
            self.close_connection = True

    def _events(self, reply: Reply) -> Iterator[str]:
        yield chunk("", role="assistant")
        for number, piece in enumerate(reply.pieces):
            if reply.gate:
                reply.gate.wait()
            if reply.delay:
                time.sleep(reply.delay)
            if number == reply.fail_after:
                yield json.dumps({"error": {"message": reply.error, "request_id": self.request_id}})
                yield chunk("", finish="error")
                yield "[DONE]"
                return
            if number == reply.drop_after:
                raise ConnectionAbortedError
            reply.sent = number + 1
            yield chunk(piece, logprob=reply.logprob)
        yield chunk("", finish=reply.finish)
        yield json.dumps({"choices": [], "usage": usage(reply)})
        yield "[DONE]"

    def _refuse(self, status: int, message: str, retry_after: int | None = None) -> None:
        error = {"message": message, "request_id": self.request_id}
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self._send(status, json.dumps({"error": error}).encode(), "application/json", headers)

    def _json(self, data: Any) -> None:
        self._send(200, json.dumps(data).encode(), "application/json")

    def _send(
        self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Request-Id", self.request_id)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def chunk(
    text: str | dict[str, Any],
    role: str | None = None,
    finish: str | None = None,
    logprob: float | None = None,
) -> str:
    delta: dict[str, Any] = {"content": text} if text or role else {}
    if isinstance(text, dict):
        delta = text
    if role:
        delta["role"] = role
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    if logprob is not None:
        other = {"token": "another", "logprob": -3.0}
        token = {"token": text, "logprob": logprob, "top_logprobs": [other]}
        choice["logprobs"] = {"content": [token]}
    return json.dumps({"choices": [choice]})


def usage(reply: Reply) -> dict[str, Any]:
    prompt, cached = reply.usage
    return {
        "prompt_tokens": prompt,
        "completion_tokens": len(reply.pieces),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


if __name__ == "__main__":
    server = FakeServer(int(sys.argv[1]) if len(sys.argv) > 1 else 8001)
    print(f"the fake server is at {server.url}")
    server.serve_forever()
