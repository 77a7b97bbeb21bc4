"""KV blocks move from an engine that computes a prompt to one that decodes: the tokens are those of
one engine, and a failed transfer costs nothing but time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import adapter_of, expected_tokens, greedy, make_engine
from error_helpers import invalid_input
from kv_transfer_helpers import TOKEN, Pair, answer, run
from model_files import tiny_config, write_hf_model

from llaisys.common.sampling import SamplingParams
from llaisys.engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from llaisys.engine.kv_transfer import client, server
from llaisys.engine.kv_transfer.connection import (
    MAX_FRAME,
    Connection,
    Fetch,
    Hello,
    TransferError,
    connect,
    decode_challenge,
    decode_found,
    decode_welcome,
    listen,
)
from llaisys.engine.llm_engine import LLMEngine


@contextmanager
def fakes(transport: str, at: Path, **options: Any) -> Iterator[Pair]:
    producer = make_engine(kv_transfer=transport, **options)
    consumer = make_engine(kv_transfer=transport, **options)
    try:
        yield Pair(transport, producer, consumer, at)
    finally:
        producer.close()
        consumer.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with fakes(request.param, tmp_path) as made:
        yield made


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 4, 5, 37, 40, 41, 100, 201])
def test_consumer_computes_only_the_last_token_of_a_prompt(pair: Pair, length: int) -> None:
    prompt = [1 + number % 50 for number in range(length)]
    source = pair.prefill(prompt)  # in chunks of 64 tokens
    before = adapter_of(pair.consumer).num_tokens
    assert pair.decode(prompt, source) == expected_tokens(prompt, 6, stops=())
    assert adapter_of(pair.consumer).num_tokens - before == 1 + 5
    blocks = -(-(length - 1) // 4)
    stats = pair.stats()
    assert stats["kv_transfer_received_blocks"] == blocks == stats["kv_blocks_restored"]
    assert stats["kv_transfer_received_bytes"] == blocks * 4 * 8
    assert stats["kv_transfer_failures"] == 0 and stats["kv_transfer_seconds"] > 0
    assert pair.producer.stats()["kv_transfer_sent_blocks"] == blocks
    pair.check_idle()


def test_prompts_with_a_shared_prefix_move_only_the_rest(pair: Pair) -> None:
    shared = list(range(1, 42))
    first, second = [*shared, 5, 6, 7], [*shared, 8, 9, 10, 11, 12]
    for prompt in (first, second):
        source = pair.prefill(prompt)
        assert pair.decode(prompt, source) == expected_tokens(prompt, 6, stops=())
    assert adapter_of(pair.producer).num_tokens == len(first) + len(second) - 40
    assert pair.stats()["kv_transfer_received_blocks"] == 11 + 2
    pair.check_idle()


def test_choices_share_received_blocks_and_salts_do_not(pair: Pair) -> None:
    prompt = list(range(1, 40))
    source = pair.prefill(prompt, salt="a")
    params = SamplingParams(max_tokens=5, seed=3, n=3, ignore_eos=True)
    names = pair.submit(prompt, source, params, salt="a")
    tokens = run(pair.consumer)
    for choice, name in enumerate(names):
        assert tokens[name] == expected_tokens(prompt, 5, 3, choice, ())
    assert pair.stats()["kv_transfer_received_blocks"] == 10
    source = pair.prefill(prompt, salt="a")
    [name] = pair.submit(prompt, source, greedy(5, ignore_eos=True), salt="b")
    assert run(pair.consumer)[name] == expected_tokens(prompt, 5, stops=())
    assert pair.stats()["kv_transfer_failures"] == 1  # the blocks belong to another salt
    assert pair.stats()["kv_transfer_received_blocks"] == 10
    pair.check_idle()


def test_many_prompts_in_flight_beside_running_requests(pair: Pair) -> None:
    prompts = [[1 + (7 * n + i) % 60 for i in range(10 + 13 * n)] for n in range(8)]
    sources = [pair.prefill(prompt) for prompt in prompts]
    [running] = pair.submit([1, 2, 3], "", greedy(60, ignore_eos=True))
    names = []
    for prompt, source in zip(prompts, sources, strict=True):
        names += pair.submit(prompt, source, greedy(9, ignore_eos=True))
        pair.consumer.core.step()
    tokens = run(pair.consumer)
    assert len(tokens[running]) <= 60
    for prompt, name in zip(prompts, names, strict=True):
        assert tokens[name] == expected_tokens(prompt, 9, stops=())
    assert pair.stats()["kv_transfer_failures"] == 0
    pair.check_idle()


KINDS = [("f32", "auto", 1), ("bf16", "auto", 1), ("f32", "q8", 1), ("f32", "auto", 2)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("dtype", "kv_dtype", "ranks"), KINDS)
def test_real_models_continue_with_the_tokens_of_one_engine(
    dtype: str, kv_dtype: str, ranks: int, transport: str, tmp_path: Path
) -> None:
    write_hf_model(tmp_path / "model", tiny_config())
    config = EngineConfig(
        model=str(tmp_path / "model"),
        dtype=dtype,
        n_threads=1,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48),
        cache=CacheConfig(
            num_kv_blocks=40, block_size=8, kv_transfer=transport, kv_cache_dtype=kv_dtype
        ),
        parallel=ParallelConfig(tensor_parallel_size=ranks),
    )
    alone, producer, consumer = (LLMEngine(config) for _ in range(3))
    try:
        pair = Pair(transport, producer, consumer, tmp_path)
        vocabulary = alone.model_info.vocab_size
        shared = [(11 * i) % vocabulary for i in range(70)]
        for tail in (1, 2, 9, 18):
            prompt = [*shared, *((5 * i + tail) % vocabulary for i in range(tail))]
            for params in (greedy(7), SamplingParams(max_tokens=7, seed=tail, temperature=1.0)):
                expected = answer(alone, prompt, params)
                [name] = pair.submit(prompt, pair.prefill(prompt), params)
                assert run(consumer)[name] == expected
        stats = consumer.stats()
        assert stats["kv_transfer_failures"] == 0 and stats["kv_transfer_received_blocks"] >= 12
        assert stats["prefix_cache_host_hits"] > 70
        pair.check_idle()
    finally:
        for engine in (alone, producer, consumer):
            engine.close()


# ---- failures ------------------------------------------------------------------------------------


def test_lost_prompts_and_producers_are_computed_by_the_consumer(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(1, 40))
    source = pair.prefill(prompt)
    unknown = f"other@{pair.address}"
    assert pair.decode(prompt, unknown) == expected_tokens(prompt, 6, stops=())
    assert "computes its prompt of 39 tokens" in caplog.text
    pair.producer.core.kv_transfer.close()  # type: ignore[union-attr]
    longer = [*range(3, 50), 1]
    assert pair.decode(longer, source) == expected_tokens(longer, 6, stops=())
    assert pair.stats()["kv_transfer_failures"] == 2
    pair.consumer.core.scheduler.check_integrity()


def test_unfetched_prompts_expire(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PUBLISHED_SECONDS", 0.0)
    pair.prefill(list(range(1, 40)))
    pair.check_idle()


def test_cancelled_and_expired_requests_release_their_host_slots(pair: Pair) -> None:
    prompts = [[n, *range(1, 60)] for n in range(1, 4)]
    sources = [pair.prefill(prompt) for prompt in prompts]
    core = pair.consumer.core
    [cancelled] = pair.submit(prompts[0], sources[0], greedy(4))
    update = core.finish_request(cancelled)
    assert update is not None and update.status.finish_reason == "abort"
    [expired] = pair.consumer.input_processor.process(prompts[1], greedy(4)).requests
    expired.kv_source = sources[1]
    core.add_requests([expired], deadline=time.monotonic() - 1)
    assert [[r.request_id for r in group] for group in core.expire()] == [[expired.request_id]]
    run(pair.consumer)
    assert pair.decode(prompts[2], sources[2]) == expected_tokens(prompts[2], 6, stops=())
    pair.check_idle()


@pytest.mark.parametrize("slots", [1, 3, 9])
def test_few_host_slots_move_part_of_a_prompt(tmp_path: Path, slots: int) -> None:
    with fakes("shm", tmp_path, kv_offload=slots * 4 * 64, num_blocks=40) as pair:
        for start in range(1, 5):
            prompt = [start, *range(1, 60)]
            source = pair.prefill(prompt)
            assert pair.decode(prompt, source) == expected_tokens(prompt, 6, stops=())
        assert 0 < pair.stats()["kv_transfer_received_blocks"] <= 4 * slots
        pair.check_idle()


def test_other_layouts_and_tokens_are_rejected(tmp_path: Path) -> None:
    producer = make_engine(kv_transfer="shm")
    consumer = make_engine(kv_transfer="shm", block_size=8)
    pair = Pair("shm", producer, consumer, tmp_path)
    prompt = list(range(1, 40))
    assert pair.decode(prompt, pair.prefill(prompt)) == expected_tokens(prompt, 6, stops=())
    assert pair.stats()["kv_transfer_failures"] == 1
    stranger = connect(pair.address, 5.0)
    challenge = stranger.receive(decode_challenge)
    stranger.send(Hello(b"\0" * 32, "layout"))
    with pytest.raises(TransferError):
        stranger.receive(decode_welcome)
    assert challenge.nonce != connect(pair.address, 5.0).receive(decode_challenge).nonce
    producer.close()
    consumer.close()


BAD_REPLIES = {
    "too many tokens": b"\x83\xa4type\xa5found\xaanum_tokens\xcd\x03\xe8\xa5slots\x91\x00",
    "no msgpack": b"\xc1\xc1\xc1",
    "another message": b"\x81\xa4type\xa4done",
    "a huge frame": b"",
}


@pytest.mark.parametrize("reply", list(BAD_REPLIES))
def test_invalid_replies_of_a_producer_are_rejected(
    tmp_path: Path, reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer knows the token and replies nonsense."""
    monkeypatch.setattr(client, "TIMEOUT", 2.0)
    listener, address = listen("tcp:127.0.0.1:0")

    def serve() -> None:
        opened, _ = listener.accept()
        peer = Connection(opened, 5.0)
        peer.send(server.Challenge(b"n" * 32))
        peer.receive(server.decode_hello)
        peer.send(server.Welcome())
        peer.receive(server.decode_fetch)
        data = BAD_REPLIES[reply]
        peer.send_bytes((len(data) or MAX_FRAME + 1).to_bytes(4, "little") + data)
        peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with fakes("tcp", tmp_path) as pair:
        prompt = list(range(1, 40))
        assert pair.decode(prompt, f"x@{address}") == expected_tokens(prompt, 6, stops=())
        assert pair.stats()["kv_transfer_failures"] == 1
        pair.check_idle()
    thread.join(5)
    listener.close()


def test_a_silent_producer_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, fakes("tcp", tmp_path) as pair:
        prompt = list(range(1, 40))
        address = f"x@tcp:127.0.0.1:{silent.getsockname()[1]}"
        assert pair.decode(prompt, address) == expected_tokens(prompt, 6, stops=())
        assert pair.stats()["kv_transfer_failures"] == 1
        pair.check_idle()


def test_a_fetch_gets_what_was_published_and_nothing_else(pair: Pair) -> None:
    prompt = list(range(1, 40))
    name = pair.prefill(prompt).partition("@")[0]
    [source] = [client._Source(pair.address, TOKEN, c._layout, c._memory) for c in [
        pair.consumer.core.kv_transfer._client  # type: ignore[union-attr]
    ]]  # fmt: skip
    connection = source._open()
    for fetch in (
        Fetch("unknown", b"", "", 0, 10),
        Fetch(name, b"\1\0\0\0", "", 0, 10),  # other tokens end the publication
        Fetch(name, b"\1\0\0\0", "", -3, 1 << 40),
    ):
        connection.send(fetch)
        assert connection.receive(decode_found).slots == []
    source.close()
    pair.check_idle()


def test_options_that_exclude_each_other() -> None:
    with invalid_input("kv_transfer"):
        make_engine(kv_transfer="shm", enable_prefix_caching=False)
    with invalid_input("distributed_executor_backend"):
        EngineConfig(
            cache=CacheConfig(kv_transfer="tcp"),
            parallel=ParallelConfig(distributed_executor_backend="mp"),
        )
