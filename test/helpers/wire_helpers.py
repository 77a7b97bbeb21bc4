"""What goes over the wire to a server in a test: raw requests, event streams, certificates."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from server_helpers import ServerProcess


def sse_events(response: httpx.Response) -> Iterator[str]:
    """The data of each event."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line[6:]


def completion_choices(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What /v1/completions answers to one prompt: the choice, or with `stream` its chunks."""
    path = "/v1/completions"
    with server.client() as client:
        if not body.get("stream"):
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"])
        with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            *events, done = list(sse_events(response))
    assert done == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


def make_certificate(folder: Path) -> tuple[Path, Path, Path]:
    """(certificate, key, the authority to trust) for 127.0.0.1."""
    import trustme

    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    certificate, key, trust = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))
    leaf.cert_chain_pems[0].write_to_path(certificate)
    leaf.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(trust)
    return certificate, key, trust


def raw_events(received: bytes) -> list[str]:
    """The data of each event of a stream as it came over the wire, whole events to a chunk."""
    lines = received.decode().replace("\r\n", "\n").split("\n")
    return [line.removeprefix("data: ").strip() for line in lines if line.startswith("data: ")]


def post_bytes(body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> bytes:
    """A whole request as it goes over the wire; `X_Request_Id="a"` is a header of that name."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def raw_request(
    server: ServerProcess,
    body: dict[str, Any],
    receive_buffer: int | None = None,
    **headers: str,
) -> socket.socket:
    connection = server.connect(receive_buffer)
    connection.sendall(post_bytes(body, **headers))
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """Until the server closes, in whatever way."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            received += chunk
    return received


def reset(connection: socket.socket) -> None:
    """Close with RST, as a killed client may."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
