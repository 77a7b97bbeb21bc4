"""Bodies: items are counted before parsing, independent of string contents."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from http_helpers import CHAT, chat, error_of
from hypothesis import given
from hypothesis import strategies as st

from llaisys.server.errors import ApiError
from llaisys.server.http import request_bodies as bodies
from llaisys.server.http.request_bodies import check_structure, outside_strings, parse_body
from llaisys.server.schemas.chat import CompletionRequest

JSON = st.recursive(
    st.none() | st.integers() | st.text('ab[]{},:"\\\né\u2028', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('a,"\\'), inner, max_size=5)
    ),
    max_leaves=30,
)


def counts(value: Any) -> tuple[int, int, int]:
    """(commas, containers, fields), counted in the parsed value."""
    if not isinstance(value, (list, dict)):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    below = [counts(item) for item in inner]
    sums = [sum(column) for column in zip(*below, strict=True)] if below else [0, 0, 0]
    fields = len(value) if isinstance(value, dict) else 0
    return sums[0] + max(0, len(inner) - 1), sums[1] + 1, sums[2] + fields


@given(value=JSON, size=st.integers(1, 40), ascii=st.booleans())
def test_counts_only_outside_strings(value: Any, size: int, ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "SLICE_BYTES", size)
        outside = b"".join(outside_strings(body))
    found = (outside.count(b","), outside.count(b"[") + outside.count(b"{"), outside.count(b":"))
    assert found == counts(value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"1," * 300_000 + b"1]}",
        b'{"prompt":[' + b"[1]," * 20_000 + b"[1]]}",
        b"[" * 100_000,
        b"{" + b",".join(b'"f%d":1' % number for number in range(70_000)) + b"}",
    ],
)
def test_oversized_structure_is_rejected_before_parsing(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(bodies, "read_json", lambda body: pytest.fail("it was parsed"))
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionRequest, body, 256 << 10)
    assert (caught.value.status, caught.value.code) == (400, "too_many_items")


def test_brackets_inside_strings_do_not_count() -> None:
    text = '[{,:\\"' * 400_000
    check_structure(json.dumps({"prompt": text}).encode(), 256 << 10)


def test_bodies_must_be_utf_8(client: httpx.Client) -> None:
    """Other encodings could evade the count; JSON is UTF-8 (RFC 8259)."""
    headers = {"content-type": "application/json"}
    for name in ("utf-16", "utf-32", "utf-16-le"):
        content = json.dumps(chat()).encode(name)
        error = error_of(client.post(CHAT, content=content, headers=headers), 400)
        assert error["code"] == "invalid_json"
    answer = client.post(CHAT, content=json.dumps(chat()).encode("utf-8-sig"), headers=headers)
    assert answer.status_code == 200


def test_large_template_variables_are_rejected(client: httpx.Client) -> None:
    small, large = {"x": ["a" * 100] * 10}, {"x": ["a" * 100] * 200}
    assert client.post(CHAT, json=chat(chat_template_kwargs=small)).status_code == 200
    error = error_of(client.post(CHAT, json=chat(chat_template_kwargs=large)), 400)
    assert error["param"] == "chat_template_kwargs" and "16384" in error["message"]
    body = {"messages": chat()["messages"], "chat_template_kwargs": large}
    assert client.post("/tokenize", json=body).status_code == 400
