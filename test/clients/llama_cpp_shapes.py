"""What llama.cpp's own server tests look at, as requests of ours: one function for each of them (or
for several that differ in their data). Written after its test files, whose texts of a story model
are left out: no other model says them. `SHAPES` and `NOT_HELD` are counted by the table of
docs/internals/peer_tests.md."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from wire_helpers import sse_events

ALIAS, KEY, ORIGIN = "tinyllama-2", "sk-of-the-shapes", "https://web.example"
CONTEXT, BATCH, SEQUENCES = 1024, 64, 4
LIFE = "I believe the meaning of life is"
BOOK = [
    {"role": "system", "content": "Book"},
    {"role": "user", "content": "What is the best book"},
]
FIXED = {"seed": 42, "temperature": 0.0, "ignore_eos": True}  # a random model may end at once


@dataclass(frozen=True)
class Shape:
    file: str
    count: int  # tests of theirs, by parameters
    check: Callable[[httpx.Client], None]


SHAPES: list[Shape] = []

# (file, tests, why)
NOT_HELD = [
    ("basic", 1, "/props: a model has a name here, no path; there is no seed of the server"),
    ("basic", 1, "/slots is served unless --no-slots is given"),
    ("basic", 1, "GGUF files in several parts"),
    ("basic", 1, "tags of a model"),
    ("chat_completion", 2, "a last assistant message goes on when asked to"),
    ("chat_completion", 1, "consecutive assistant messages depend on the template"),
    ("ctx_shift", 1, "a prompt is never cut"),
    ("security", 1, "/models needs the key"),
    ("security", 3, "CORS headers are narrower: no credentials, the headers asked for"),
    ("slot_save", 2, "a restored slot computes its tokens again, in whole blocks: other counts"),
    ("compat_anthropic", 1, "an image is a 400, not a 500"),
    ("compat_anthropic", 1, "no messages are a 400"),
    ("embedding", 1, "the empty text, of a model that puts nothing before it"),
    ("embedding", 2, "pooling none"),
    ("embedding", 1, "another message for a text that is too long"),
    ("rerank", 2, "which document is the best depends on the model"),
]


def shape(file: str, count: int = 1) -> Callable[[Callable[[httpx.Client], None]], Any]:
    def add(check: Callable[[httpx.Client], None]) -> Callable[[httpx.Client], None]:
        SHAPES.append(Shape(file, count, check))
        return check

    return add


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def complete(client: httpx.Client, prompt: Any = LIFE, **fields: Any) -> Any:
    return post(client, "/completion", prompt=prompt, **{**FIXED, "n_predict": 8, **fields})


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(event) for event in sse_events(response) if event != "[DONE]"]


# ---- test_basic ----------------------------------------------------------------------------------


@shape("basic", 2)
def starts(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200


@shape("basic")
def models(client: httpx.Client) -> None:
    assert client.get("/models").json()["data"][0]["id"] == ALIAS


@shape("basic")
def page(client: httpx.Client) -> None:
    assert "<!doctype html>" in client.get("/").text  # --no-ui: test_online_http


# ---- test_completion -----------------------------------------------------------------------------


@shape("completion", 2)
def completion(client: httpx.Client) -> None:
    for count, tokens in ((8, False), (64, True)):
        body = complete(client, n_predict=count, return_tokens=tokens, cache_prompt=False)
        assert body["timings"]["prompt_n"] == len(LIFE)
        assert body["timings"]["predicted_n"] == count and body["truncated"] is False
        assert type(body["has_new_line"]) is bool
        assert len(body["tokens"]) == (count if tokens else 0)


@shape("completion", 2)
def completion_stream(client: httpx.Client) -> None:
    body = {"prompt": LIFE, "n_predict": 8, "cache_prompt": False, **FIXED}
    *parts, last = streamed(client, "/completion", **body)
    assert all(part["stop"] is False and part["tokens"] for part in parts)
    assert last["stop"] is True and last["stop_type"] == "limit"
    assert last["timings"]["prompt_n"] == len(LIFE) and last["timings"]["predicted_n"] == 8
    settings = last["generation_settings"]
    assert (settings["n_predict"], settings["seed"]) == (8, 42)


@shape("completion")
def stream_is_the_whole(client: httpx.Client) -> None:
    parts = streamed(client, "/completion", prompt=LIFE, n_predict=8, **FIXED)
    assert "".join(part["content"] for part in parts) == complete(client)["content"]


@shape("completion", 2)
def through_openai(client: httpx.Client) -> None:
    fields = {"model": ALIAS, "prompt": LIFE, "max_tokens": 8, "ignore_eos": True}
    body = post(client, "/v1/completions", **fields)
    assert body["system_fingerprint"].startswith("b")
    assert body["choices"][0]["finish_reason"] == "length"
    parts = streamed(client, "/v1/completions", **fields)
    assert "".join(part["choices"][0]["text"] for part in parts)


@shape("completion", 7)  # four seeds and batches of theirs, and cached or not, which they skip
def same_result(client: httpx.Client) -> None:
    found = [
        complete(client, cache_prompt=cache, temperature=1.0)["content"]
        for cache in (True, False, True)
    ]
    assert found[0] == found[1] == found[2]
    others = {complete(client, temperature=1.0, seed=seed)["content"] for seed in range(4)}
    assert len(others) == 4


@shape("completion")
def too_long(client: httpx.Client) -> None:
    complete_of = {"prompt": LIFE * 33, "cache_prompt": False}
    assert post(client, "/completion", 400, **complete_of)["error"]


@shape("completion")
def tokens_as_prompt(client: httpx.Client) -> None:
    tokens = post(client, "/tokenize", content=LIFE, add_special=True)["tokens"]
    text = complete(client)["content"]
    assert complete(client, tokens)["content"] == text
    for several in ([tokens, tokens], [tokens, LIFE]):
        assert [answer["content"] for answer in complete(client, several)] == [text, text]
    assert type(complete(client, [1, 2, 3, LIFE, 7, 8, LIFE])["content"]) is str


@shape("completion", 6)  # five numbers of requests and slots, and one that was cancelled
def slots(client: httpx.Client) -> None:
    for _ in range(1000):  # a stream may be read before its place is free
        found = client.get("/slots").json()
        if not any(slot["is_processing"] for slot in found):
            break
    assert len(found) == SEQUENCES and not any(slot["is_processing"] for slot in found)
    assert found[0]["n_ctx"] == CONTEXT and "params" not in found[0]


@shape("completion", 2)
def response_fields(client: httpx.Client) -> None:
    names = ["content", "generation_settings/n_predict", "prompt"]
    body = complete(client, response_fields=names)
    assert set(body) == set(names) and body["prompt"] == LIFE
    assert body["generation_settings/n_predict"] == 8
    assert "generation_settings" in complete(client, response_fields=[])


@shape("completion", 2)
def probabilities(client: httpx.Client) -> None:
    whole = complete(client, n_probs=10, n_predict=5)["completion_probabilities"]
    parts = streamed(client, "/completion", prompt=LIFE, n_probs=10, n_predict=5, **FIXED)
    streamed_entries = [
        entry for part in parts for entry in part.get("completion_probabilities", ())
    ]
    assert len(whole) == len(streamed_entries) == 5
    for token in (*whole, *streamed_entries):
        assert len(token["top_logprobs"]) == 10
        for entry in (token, *token["top_logprobs"]):
            assert type(entry["id"]) is int and type(entry["token"]) is str
            assert entry["logprob"] <= 0 and type(entry["bytes"]) is list


@shape("completion")
def probabilities_after_sampling(client: httpx.Client) -> None:
    fields = {"n_probs": 10, "n_predict": 5, "post_sampling_probs": True, "temperature": 1.0}
    found = complete(client, **fields)["completion_probabilities"]
    assert len(found) == 5
    for token in found:
        assert 0 < token["prob"] <= 1 and len(token["top_probs"]) <= 10
        assert all(0 <= entry["prob"] <= 1 for entry in token["top_probs"])


@shape("completion", 4)
def logit_bias(client: httpx.Client) -> None:
    tokens = complete(client, n_predict=32, return_tokens=True)["tokens"]
    banned = [token for token in set(tokens) if 36 <= token < 68][:4] or [40]  # of a byte each
    texts = post(client, "/detokenize", tokens=banned)["content"]
    for pairs in ([[token, -100] for token in banned], [[char, -100] for char in texts]):
        for bias in (pairs, {str(key): value for key, value in pairs}):
            body = complete(client, n_predict=32, logit_bias=bias, return_tokens=True)
            assert not set(banned) & set(body["tokens"])


# ---- test_ctx_shift, test_infill, test_tokenize, test_ignore_eos ---------------------------------


@shape("ctx_shift", 2)
def short_prompts(client: httpx.Client) -> None:
    prompt = "x" * (CONTEXT - 120)
    for count, found, truncated in ((64, 64, False), (-1, 120, True)):
        body = complete(client, prompt, n_predict=count)
        assert body["timings"]["predicted_n"] == found and body["truncated"] is truncated


@shape("ctx_shift")
def long_prompt(client: httpx.Client) -> None:
    error = post(client, "/completion", 400, prompt="x" * 2000, n_predict=64)["error"]
    assert "exceeds the available context size" in error["message"]


@shape("ctx_shift")
def long_answer(client: httpx.Client) -> None:
    body = {"prompt": "x" * (CONTEXT - 60), "n_predict": 2 * CONTEXT, **FIXED}
    parts = streamed(client, "/v1/completions", **body)
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons[-1] == "length" and not any(reasons[:-1])


CODE = {"input_prefix": "int main() {\n", "prompt": "    int n = ", "input_suffix": "}\n"}


@shape("infill", 2)
def infill(client: httpx.Client) -> None:
    plain = post(client, "/infill", **CODE, **FIXED, n_predict=8)
    marked = "<|fim_prefix|>int main() {\n    int n = <|fim_suffix|>}\n<|fim_middle|>"
    assert plain["prompt"] == marked and plain["tokens_predicted"] == 8
    extra = [{"filename": "n.h", "text": "int n();\n"}]
    more = post(client, "/infill", **CODE, **FIXED, n_predict=8, input_extra=extra)
    assert more["prompt"].startswith("<|repo_name|>") and more["prompt"].endswith(marked)
    assert "<|file_sep|>n.h\nint n();\n" in more["prompt"]


@shape("infill", 5)
def wrong_extra(client: httpx.Client) -> None:
    for extra in ({}, {"filename": "ok"}, {"filename": 1}, {"filename": 1, "text": "a"},
                  {"filename": 1, "text": 2}):  # fmt: skip
        assert post(client, "/infill", 400, **CODE, input_extra=[extra])["error"]


@shape("tokenize", 3)
def tokenize(client: httpx.Client) -> None:
    content = "What is 媽 🤗 of France ?"
    tokens = post(client, "/tokenize", content=content)["tokens"]
    assert post(client, "/detokenize", tokens=tokens)["content"] == content
    assert post(client, "/tokenize", content=content, add_special=True)["tokens"] == tokens
    pieces = post(client, "/tokenize", content=content, with_pieces=True)["tokens"]
    assert [entry["id"] for entry in pieces] == tokens and all(entry["piece"] for entry in pieces)


@shape("ignore_eos", 2)
def bias_of_the_end(client: httpx.Client) -> None:
    body = complete(client)
    assert body["generation_settings"]["logit_bias"] == [{"token": 2, "bias": None}]
    body = complete(client, ignore_eos=False)
    assert body["generation_settings"]["logit_bias"] == []


# ---- test_embedding, test_rerank -----------------------------------------------------------------


@shape("embedding", 8)  # one, several, long ones; by last and mean; through openai; the same again
def embeddings(client: httpx.Client) -> None:
    texts = [LIFE, "This is a test", "a " * 100, LIFE]
    for pooling in ("last", "mean"):
        data = post(client, "/v1/embeddings", input=texts, pooling=pooling)["data"]
        vectors = [entry["embedding"] for entry in data]
        assert len(vectors) == 4 and vectors[0] == vectors[3]
        assert all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors)


@shape("embedding", 7)
def embedding_inputs(client: httpx.Client) -> None:
    for given, count in (
        ("string", 1), ([12, 34, 56], 1), (["a", "b"], 2), ([[12, 34], [56]], 2),
        ([12, 34, "string", 56], 1), (["a", [12, 34]], 2), ([[12], [12, "string", 34]], 2),
    ):  # fmt: skip
        data = post(client, "/v1/embeddings", input=given)["data"]
        assert len(data) == count and all(entry["embedding"] for entry in data)
    listed = post(client, "/embeddings", content=["a", "b"])
    assert [entry["index"] for entry in listed] == [0, 1] and len(listed[0]["embedding"]) == 1


@shape("embedding", 3)
def embedding_usage(client: httpx.Client) -> None:
    for given in ([LIFE], ["This is a test"], [LIFE, LIFE]):
        usage = post(client, "/v1/embeddings", input=given)["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] == sum(map(len, given))


@shape("embedding")
def embedding_base64(client: httpx.Client) -> None:
    (plain,) = post(client, "/v1/embeddings", input="x")["data"]
    (coded,) = post(client, "/v1/embeddings", input="x", encoding_format="base64")["data"]
    raw = base64.b64decode(coded["embedding"])
    numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
    assert max(abs(a - b) for a, b in zip(numbers, plain["embedding"], strict=True)) < 1e-3


DOCUMENTS = ["A machine", "Learning is", "Machine learning is a field", "Paris"]


@shape("rerank", 4)
def rerank_refusals(client: httpx.Client) -> None:
    for wrong in ([], None, 123, [1, 2, 3]):
        assert post(client, "/rerank", 400, query="Machine learning is", documents=wrong)["error"]


@shape("rerank", 10)
def rerank(client: httpx.Client) -> None:
    for top, count in ((None, 4), (2, 2), (4, 4), (99, 4)):
        fields = {"query": "Machine learning is", **({} if top is None else {"top_n": top})}
        body = post(client, "/rerank", documents=DOCUMENTS, **fields)
        listed = post(client, "/rerank", texts=DOCUMENTS, **fields)
        assert len(body["results"]) == len(listed) == count
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
        scores = [entry["score"] for entry in listed]
        assert scores == sorted(scores, reverse=True) and "index" in listed[0]
