"""A small MCP server (Streamable HTTP) for the tests of the web page: two tools, one session."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VERSION = "2025-06-18"
ADD = {
    "name": "add",
    "description": "Add two <b>numbers</b>",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
FAIL = {"name": "fail", "inputSchema": {"type": "object"}}


class McpServer(ThreadingHTTPServer):
    """`requests` records every (method, params); `session` is the only valid session id."""

    daemon_threads = True

    def __init__(self, allowed_origin: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.allowed_origin = allowed_origin
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.session = "session-1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            return {"protocolVersion": VERSION, "capabilities": {"tools": {}}}
        if method == "tools/list":
            return (
                {"tools": [FAIL]} if params.get("cursor") else {"tools": [ADD], "nextCursor": "2"}
            )
        if params["name"] == "fail":
            return {"content": [{"type": "text", "text": "no luck"}], "isError": True}
        given = params["arguments"]
        return {"content": [{"type": "text", "text": f"<b>{given['a'] + given['b']}</b>"}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: McpServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_OPTIONS(self) -> None:
        self._send(204, b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, params = message["method"], message.get("params", {})
        self.server.requests.append((method, params))
        self.server.headers.append(dict(self.headers.items()))
        known = self.headers.get("Mcp-Session-Id") == self.server.session
        if method != "initialize" and not known:
            self._send(404, b"no such session", "text/plain")
        elif "id" not in message:
            self._send(202, b"")
        else:
            result = self.server.result(method, params)
            answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
            if method != "tools/call":
                self._send(200, answer.encode(), "application/json")
                return
            note = json.dumps({"jsonrpc": "2.0", "method": "notifications/message"})
            events = f"event: message\ndata: {note}\n\nevent: message\ndata: {answer}\n\n"
            self._send(200, events.encode(), "text/event-stream")

    def _send(self, status: int, body: bytes, kind: str = "") -> None:
        self.send_response(status)
        self.send_header("Access-Control-Allow-Origin", self.server.allowed_origin)
        self.send_header("Access-Control-Allow-Headers", "*")
        self.send_header("Access-Control-Expose-Headers", "Mcp-Session-Id")
        if status == 200:
            self.send_header("Mcp-Session-Id", self.server.session)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
