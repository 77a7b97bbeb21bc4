"""Output text: stop strings across tokens, delayed text, streams that equal the final text."""

from __future__ import annotations

import time
from collections import deque

import pytest
from engine_fakes import EOS, FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st

from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import StreamOutput, TokenUpdate
from llaisys.engine.output_processor import DECODE_BATCH, OutputOptions, OutputProcessor
from llaisys.engine.stop_strings import MAX_MASKS, StopStringFinder, StopStrings
from llaisys.server.engine_client.deltas import merge_deltas
from llaisys.server.generation.timings import PromptProgressReporter

RUNNING, LENGTH = RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH_CAPPED
STOPPED = RequestStatus.FINISHED_STOPPED


def drive(
    chunks: list[list[int]], last: RequestStatus = LENGTH, stream: bool = True, **params
) -> tuple[list[StreamOutput], list[str]]:
    """Process chunks of tokens; return (parts, requests ended by a stop string)."""
    processor = OutputProcessor(FakeTokenizer())
    sampling = SamplingParams(**params)
    request = Request("r", [1], sampling)
    processor.add("r", None, sampling, [request], stream)
    parts, ended = [], []
    for index, chunk in enumerate(chunks):
        status = last if index == len(chunks) - 1 else RUNNING
        new, stopped = processor.process([TokenUpdate("r", list(chunk), status)])
        parts += new
        ended += stopped
    assert not processor.num_choices or parts[-1].output is None
    return parts, ended


def letters(text: str, size: int = 1) -> list[list[int]]:
    data = list(text.encode())
    return [data[i : i + size] for i in range(0, len(data), size)]


def final(parts: list[StreamOutput]):
    output = parts[-1].output
    assert output is not None
    (choice,) = output.outputs
    assert choice.text == "".join(part.text for part in parts)
    return choice


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_across_tokens(size, stream):
    parts, ended = drive(letters("one two STOP three", size), stop="STOP", stream=stream)
    choice = parts[-1].output.outputs[0]
    assert choice.text == "one two "
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "STOP")
    assert choice.status is STOPPED and ended == ["r"]
    end = len("one two STOP")
    assert len(choice.token_ids) == end  # tokens after the stop string are discarded


def test_stop_string_can_be_included():
    parts, _ = drive(letters("a STOP b"), stop="STOP", include_stop_str_in_output=True)
    assert final(parts).text == "a STOP"


def test_prefix_of_a_stop_string_is_delayed_and_released():
    parts, _ = drive(letters("aSTx"), stop="STOP")
    assert [part.text for part in parts] == ["a", "", "", "STx"]
    assert final(parts).finish_reason == "length"


def test_delayed_text_is_output_at_the_end():
    parts, _ = drive(letters("aSTO"), stop="STOP")
    assert final(parts).text == "aSTO" and parts[-1].text == "STO"


def test_the_match_that_ends_first_wins():
    parts, _ = drive(letters("xxabcd"), stop=["bcd", "abc", "c"])
    assert final(parts).stop_reason == "abc" and final(parts).text == "xx"
    parts, _ = drive([list(b"one END two stop")], stop=["stop", "END"])
    assert final(parts).text == "one "


def test_stop_strings_wait_for_min_tokens():
    parts, _ = drive(letters("..a.b.c"), stop=".", min_tokens=4)
    assert final(parts).text == "..a" and len(final(parts).token_ids) == 4


def test_stop_string_in_the_last_token_overrides_length():
    parts, ended = drive(letters("ab"), stop="b")
    assert final(parts).finish_reason == "stop" and ended == []


def test_eos_has_no_text_unless_requested():
    chunks = [[*b"hi"], [EOS]]
    parts, _ = drive(chunks, last=STOPPED)
    assert final(parts).text == "hi" and final(parts).token_ids[-1] == EOS
    parts, _ = drive(chunks, last=STOPPED, skip_special_tokens=False)
    assert final(parts).text == "hi"
    parts, _ = drive(
        chunks, last=STOPPED, skip_special_tokens=False, include_stop_str_in_output=True
    )
    assert final(parts).text == "hi<eos>"


def test_no_text_without_detokenize():
    parts, _ = drive(letters("abc"), detokenize=False)
    assert final(parts).text == "" and len(final(parts).token_ids) == 3


def test_character_of_several_tokens_is_output_whole():
    parts, _ = drive(letters("né世"))
    assert [part.text for part in parts] == ["n", "", "é", "", "", "世"]
    cut, _ = drive(letters("né世")[:-1])
    assert final(cut).text == "né\ufffd"


def test_surplus_tokens_of_a_finished_request_are_discarded():
    processor = OutputProcessor(FakeTokenizer())
    params = SamplingParams(stop="b")
    processor.add("r", None, params, [Request("r", [1], params)], True)
    processor.process([TokenUpdate("r", [97], RUNNING)])
    (part,), stopped = processor.process([TokenUpdate("r", [98], RUNNING)])
    assert stopped == ["r"] and part.output.token_ids == [97, 98]
    assert processor.process([TokenUpdate("r", [99], RUNNING)]) == ([], [])


def watched(reading: OutputOptions, tells: bool = False, stream: bool = True) -> OutputProcessor:
    processor = OutputProcessor(FakeTokenizer())
    params = SamplingParams()
    request = Request("r", [1, 2, 3, 4], params, reports_progress=tells)
    processor.add("r", None, params, [request], stream, reading)
    return processor


def test_prompt_progress_is_reported_until_the_first_token():
    processor = watched(OutputOptions(progress=True), tells=True)
    reported = [
        part.progress
        for update in (
            TokenUpdate("r", [], RUNNING, num_cached_tokens=1, num_computed_prompt_tokens=3),
            TokenUpdate("r", [97], RUNNING, num_cached_tokens=1),
            TokenUpdate("r", [98], RUNNING, num_cached_tokens=1),
        )
        for part in processor.process([update])[0]
    ]
    assert [(p.total, p.cached, p.done) for p in reported[:2]] == [(4, 1, 3), (4, 1, 4)]
    assert reported[2] is None
    teller = PromptProgressReporter()
    found = [fields["prompt_progress"] for p in reported for fields in teller.fields(p)]
    assert [entry["processed"] for entry in found] == [1, 3, 4]
    assert list(teller.fields(reported[0])) == []  # after a preemption
    silent = watched(OutputOptions(), tells=True, stream=False)
    assert silent.process([TokenUpdate("r", [], RUNNING, num_computed_prompt_tokens=3)]) == ([], [])


def test_progress_before_the_first_token_is_separate():
    processor = watched(OutputOptions(progress=True), tells=True)
    parts = deque()
    for update in (
        TokenUpdate("r", [], RUNNING, num_computed_prompt_tokens=2),
        TokenUpdate("r", [97], RUNNING),
        TokenUpdate("r", [98], RUNNING),
    ):
        parts.extend(processor.process([update])[0])
    first, second = merge_deltas(parts), merge_deltas(parts)
    assert first.token_ids == [] and first.progress.done == 2
    assert second.token_ids == [97, 98] and second.progress.done == 4 and not parts


@pytest.mark.parametrize("stream", [True, False])
def test_line_seconds_ends_the_answer_at_a_line_break(stream):
    processor = watched(OutputOptions(line_seconds=0.0), stream=stream)
    for token in (97, 98):
        assert processor.process([TokenUpdate("r", [token], RUNNING)])[1] == []
    (part,), stopped = processor.process([TokenUpdate("r", [10], RUNNING)])
    assert stopped == ["r"] and part.finish_reason == "length"
    assert part.output.text == "ab\n"
    patient = watched(OutputOptions(line_seconds=1e9), stream=stream)
    assert patient.process([TokenUpdate("r", [10], RUNNING)])[1] == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_check_of_the_options_ends_an_output_inside_an_update(size):
    """It sees each token of an update, also of one that the engine has ended later."""
    for last in (RUNNING, LENGTH):
        seen: list[str] = []

        def check(text: str, seen: list[str] = seen) -> bool:
            seen.append(text)
            return text == "c"

        processor = watched(OutputOptions(end_check=lambda check=check: check))
        parts, ended = [], []
        for chunk in letters("abcde", size):
            status = last if chunk[-1] == ord("e") else RUNNING
            found, stopped = processor.process([TokenUpdate("r", chunk, status)])
            parts += found
            ended += stopped
        choice = final(parts)
        assert (choice.text, choice.status) == ("abc", STOPPED) and seen == ["a", "b", "c"]
        assert choice.token_ids == [97, 98, 99] and choice.stop_reason is None
        assert ended == ([] if last is LENGTH and size == 5 else ["r"])


TEXTS = st.text(alphabet="ab é", min_size=0, max_size=30)


@given(
    text=TEXTS, stops=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_streamed_parts_equal_the_final_text(text, stops, data):
    """The text in any parts gives the result of a search in the whole text."""
    tokens = list(text.encode()) or [97]
    chunks, rest = [], tokens
    while rest:
        size = data.draw(st.integers(1, 5))
        chunks.append(rest[:size])
        rest = rest[size:]
    parts, _ = drive(chunks, stop=stops)
    whole = bytes(tokens).decode()
    found = [(whole.find(s) + len(s), whole.find(s)) for s in dict.fromkeys(stops) if s in whole]
    choice = final(parts)
    assert choice.text == (whole[: min(found)[1]] if found else whole)
    assert (choice.finish_reason == "stop") == bool(found)
    plain, _ = drive(chunks, stop=stops, stream=False)
    assert plain[-1].output.text == choice.text


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_output_text_never_contains_a_stop_string(pieces, stops):
    finder = StopStringFinder(StopStrings(tuple(stops)), include=False)
    shown = ""
    for piece in pieces:
        text, stop = finder.add(piece)
        shown += text
        if stop is not None:
            break
    else:
        shown += finder.flush()
        assert shown == "".join(pieces)
    assert not any(stop in shown for stop in stops)


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=5),
)
def test_delayed_text_is_the_longest_prefix_of_a_stop_string(pieces, stops):
    """The reference: every suffix of the text against every prefix of every string."""
    finder = StopStringFinder(StopStrings(tuple(stops)), include=True)
    text = shown = ""
    for piece in pieces:
        text += piece
        part, stop = finder.add(piece)
        shown += part
        ends = [text.find(s) + len(s) for s in stops if s in text]
        if ends:
            assert stop is not None and shown == text[: min(ends)] and shown.endswith(stop)
            longest = max(len(s) for s in stops if shown.endswith(s))
            assert len(stop) == longest
            return
        beginnings = [s[:size] for s in stops for size in range(1, len(s))]
        held = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert stop is None and shown == text[: len(text) - held]


def test_masks_beyond_the_cache_are_correct():
    stop = "".join(chr(0x4E00 + number) for number in range(4 * MAX_MASKS))
    finder = StopStringFinder(StopStrings((stop, "x")), include=False)
    for character in stop[:-1]:
        assert finder.add(character) == ("", None)
    assert finder.add(stop[-1]) == ("", stop)


def test_stop_strings_cost_the_same_for_each_character_of_a_text():
    """63 strings of 1,024 characters that almost match. A repeated search of the delayed text would
    take milliseconds per token of four characters; the automaton takes 50 microseconds."""
    stops = StopStrings(tuple("a" * 1000 + f"{number:024d}" for number in range(63)))
    finders = [StopStringFinder(stops, include=False) for _ in range(32)]
    for finder in finders:
        assert finder.add("a" * 1500) == ("a" * 500, None)
    start = time.process_time()
    for _ in range(20):
        for finder in finders:
            assert finder.add("aaaa") == ("aaaa", None)
    assert (time.process_time() - start) / (20 * 32) < 0.0003


class CountingTokenizer(FakeTokenizer):
    """Counts detokenized tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded = 0

    def detokenizer(self, skip_special_tokens: bool = True):
        inner, counter = super().detokenizer(skip_special_tokens), self

        class Counting:
            def add_all(self, token_ids):
                ids = list(token_ids)
                counter.decoded += len(ids)
                return inner.add_all(ids)

            def finish(self):
                return inner.finish()

        return Counting()


@pytest.mark.parametrize("last", [LENGTH, STOPPED])
@pytest.mark.parametrize("length", [1, 255, 256, 257, 1000])
def test_many_choices_ending_together_cost_no_more_than_another_step(length, last):
    """Detokenization is staggered by choice; at most one batch per choice is left at the end."""
    tokenizer, n = CountingTokenizer(), 128
    processor, sampling = OutputProcessor(tokenizer), SamplingParams(n=n)
    requests = [Request(f"r{number}", [1], sampling, choice=number) for number in range(n)]
    processor.add("r", None, sampling, requests, stream=False)
    text = ("né世" * length).encode()[: length - 1] + b"."
    per_step = []
    for place, token in enumerate(text):
        status = last if place == length - 1 else RUNNING
        before = tokenizer.decoded
        parts, _ = processor.process([TokenUpdate(r.request_id, [token], status) for r in requests])
        per_step.append(tokenizer.decoded - before)
    assert max(per_step[:-1], default=0) <= DECODE_BATCH  # one choice
    assert per_step[-1] < DECODE_BATCH * n
    shown = text[:-1] if last is STOPPED else text
    (output,) = [part.output for part in parts if part.output is not None]
    wanted = shown.decode(errors="replace")
    assert [choice.text for choice in output.outputs] == [wanted] * n
