"""`llaisys bench serve`: streaming load on any server with OpenAI's API.

Closed loop (`concurrency`): a fixed number of clients, each with one request at a time. Open loop
(`rate`): Poisson arrivals, independent of earlier responses. Prompts differ from their first word
on and from run to run, so that prefix caching helps with the chat template only.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from llaisys.bench.http_client import ConnectionPool, Endpoint
from llaisys.common.errors import LlaisysError
from llaisys.common.http_client import HttpError
from llaisys.common.progress import report
from llaisys.common.validation import invalid_value

MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 10_000
PERCENTILES = (50, 90, 99)
FEW_WORDS = 8

# Each is one token, with the space before it, in every common vocabulary.
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back "
    "parent face others level office window health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
).split()


class BenchError(LlaisysError, RuntimeError):
    """The measurement could not start."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None
    model: str | None = None  # None: the server's first model
    chat: bool = True  # else /v1/completions
    concurrency: int = 8
    rate: float | None = None  # requests per second; None: closed loop
    requests: int = 64
    prompt_tokens: int = 128
    new_tokens: int = 64
    plain: bool = False  # standard OpenAI fields only; answers may end early
    timeout: float = 300.0  # seconds per request
    insecure: bool = False  # accept any certificate
    seed: int | None = None  # of prompts and arrivals; None: random

    def __post_init__(self) -> None:
        for name, low, high in (
            ("concurrency", 1, MAX_CONCURRENCY),
            ("requests", 1, MAX_REQUESTS),
            ("prompt_tokens", 1, 1 << 24),
            ("new_tokens", 1, 1 << 24),
            ("timeout", 0.001, 86400),
            ("rate", 0.001, 1e6),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                option = "--" + name.replace("_", "-")
                raise invalid_value(name, value, f"from {low} to {high}", label=option)


@dataclass(slots=True)
class Sample:
    """Times of one request (perf_counter), or its error."""

    start: float
    first: float | None = None  # first text
    last: float | None = None  # latest text
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks with text
    pieces: int = 0  # chunks with text
    tokens: int | None = None  # generated tokens reported by the server
    prompt_tokens: int = 0  # reported by the server; 0: not reported
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.pieces if self.tokens is None else self.tokens


class EventReader:
    """Parses the events of a completion stream into a `Sample`."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.finished = False  # finish_reason received
        self.done = False  # [DONE] received
        self._rest = b""
        self._error_body = bytearray()

    def feed(self, status: int, data: bytes) -> None:
        if status != 200:
            self._error_body += data[: 4096 - len(self._error_body)]
            return
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(data)
            if chunk.get("error") is not None:
                self.sample.error = self.sample.error or f"error event: {_reason(chunk)}"
                return
            usage = chunk.get("usage")
            if usage:
                self.sample.tokens = int(usage["completion_tokens"])
                self.sample.prompt_tokens = int(usage["prompt_tokens"])
            for choice in chunk["choices"]:
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if text:
                    self._text(now)
                self.finished |= choice.get("finish_reason") is not None
        except (ValueError, KeyError, TypeError, AttributeError):
            self.sample.error = self.sample.error or "an event that is not a completion chunk"

    def _text(self, now: float) -> None:
        sample = self.sample
        if sample.first is None:
            sample.first = now
        elif sample.last is not None:
            sample.gaps.append(now - sample.last)
        sample.last = now
        sample.pieces += 1

    def close(self, status: int) -> None:
        """End of the response."""
        sample = self.sample
        if status != 200:
            sample.error = f"HTTP {status}: {_reason_of_body(bytes(self._error_body))}"
        elif sample.error is None and not (self.finished and self.done):
            sample.error = "the stream ended without a finish_reason and [DONE]"


def _reason(body: dict[str, Any]) -> str:
    error = body.get("error")
    if isinstance(error, dict):
        return str(error.get("code") or error.get("message") or error.get("type"))[:200]
    return str(error or body.get("detail") or body.get("message"))[:200]


def _reason_of_body(body: bytes) -> str:
    try:
        document = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:100] or "no reason given"
    return _reason(document) if isinstance(document, dict) else "no reason given"


class LoadGenerator:
    """Sends completion requests and measures them."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        headers = {"Accept": "text/event-stream", "User-Agent": "llaisys-bench"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self.pool = ConnectionPool(Endpoint.of(options.url, options.insecure), headers)
        self.samples: list[Sample] = []
        self.open = 0
        self.max_open = 0
        self.ignore_eos = not options.plain
        self._model = options.model
        self._seed = time.time_ns() if options.seed is None else options.seed
        self._words = options.prompt_tokens  # words per prompt of `prompt_tokens` tokens
        self._path = "/v1/chat/completions" if options.chat else "/v1/completions"

    def _body(self, number: int, words: int, new_tokens: int) -> bytes:
        rng = random.Random(f"{self._seed} {number}")
        text = " ".join(rng.choices(WORDS, k=words))
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.options.chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body).encode()

    async def ask(self, number: int, words: int, new_tokens: int) -> Sample:
        """Send one request; errors are recorded in the sample."""
        body = self._body(number, words, new_tokens)
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        sample = Sample(time.perf_counter())
        reader = EventReader(sample)
        try:
            async with asyncio.timeout(self.options.timeout):
                reader.close(await self.pool.exchange("POST", self._path, body, reader.feed))
        except TimeoutError:
            sample.error = f"not complete after {self.options.timeout:g} s"
        except HttpError as error:
            sample.error = str(error)
        finally:
            self.open -= 1
        sample.end = time.perf_counter()
        return sample

    async def prepare(self) -> None:
        """Determine the model name, whether the server accepts `ignore_eos`, and the words per
        prompt of the requested length; also warms up the server. Raises BenchError."""
        if self._model is None:
            self._model = await self._first_model()
        one = await self.ask(-1, 1, 1)
        if one.error is not None and one.error.startswith("HTTP 4") and self.ignore_eos:
            self.ignore_eos = False
            one = await self.ask(-1, 1, 1)
        if one.error is not None:
            raise BenchError(f"{self.options.url}: {one.error}")
        if not one.prompt_tokens:
            return
        # A slope from few words, which fit any context, then from a prompt of about that length.
        known = (1, one.prompt_tokens)
        self._words, target = FEW_WORDS, self.options.prompt_tokens
        for _ in range(2):
            sample = await self.ask(-1, self._words, 1)
            if sample.error is None:
                self._words = _fitting_words(target, known, (self._words, sample.prompt_tokens))

    async def _first_model(self) -> str:
        try:
            async with asyncio.timeout(self.options.timeout):
                status, body = await self.pool.fetch("/v1/models")
            if status != 200:
                raise BenchError(
                    f"{self.options.url}/v1/models: HTTP {status}: {_reason_of_body(body)}"
                )
            return str(json.loads(body)["data"][0]["id"])
        except (HttpError, TimeoutError) as error:
            raise BenchError(f"{self.options.url}: {error or 'no answer'}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise BenchError(f"{self.options.url}/v1/models names no model; use --model") from None

    async def run(self) -> float:
        """Run the load; returns the seconds from the first request to the last response."""
        self.max_open = 0
        start = time.perf_counter()
        if self.options.rate is None:
            await self._closed_loop()
        else:
            await self._open_loop(self.options.rate)
        return max(sample.end for sample in self.samples) - start

    async def _one(self, number: int) -> None:
        self.samples.append(await self.ask(number, self._words, self.options.new_tokens))
        report("requests", len(self.samples), self.options.requests)

    async def _closed_loop(self) -> None:
        numbers = iter(range(self.options.requests))

        async def client() -> None:
            for number in numbers:
                await self._one(number)

        clients = min(self.options.concurrency, self.options.requests)
        await asyncio.gather(*[client() for _ in range(clients)])

    async def _open_loop(self, rate: float) -> None:
        rng = random.Random(self._seed)
        due, tasks = time.perf_counter(), []
        for number in range(self.options.requests):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._one(number)))
            due += rng.expovariate(rate)
        await asyncio.gather(*tasks)


def _fitting_words(target: int, small: tuple[int, int], large: tuple[int, int]) -> int:
    """Words for `target` tokens, by linear interpolation of two (words, tokens)."""
    words, tokens = large
    per_word = 1.0
    if small[1] and words > small[0] and tokens > small[1]:
        per_word = (tokens - small[1]) / (words - small[0])
    return max(1, round(words + (target - tokens) / per_word))


def percentiles(seconds: list[float]) -> dict[str, float | None]:
    """Nearest-rank percentiles in milliseconds; None without samples."""
    ordered = sorted(seconds)
    return {
        f"p{q}": round(1e3 * ordered[math.ceil(len(ordered) * q / 100) - 1], 2) if ordered else None
        for q in PERCENTILES
    }


@dataclass(frozen=True, slots=True)
class ServeResult:
    report: dict[str, Any]  # printed by --json
    reasons: Counter[str]  # of failed requests
    prompt_tokens: float  # mean, reported by the server; 0: not reported
    new_tokens: float  # mean
    ignored_eos: bool


def summarise(load: LoadGenerator, seconds: float) -> ServeResult:
    """Summarise successful requests; failed ones are only counted."""
    options = load.options
    good = [sample for sample in load.samples if sample.error is None]
    tokens = sum(sample.num_tokens for sample in good)
    report = {
        "concurrency": load.max_open if options.rate is not None else options.concurrency,
        "requests": len(load.samples),
        "duration_s": round(seconds, 3),
        "throughput_tok_s": round(tokens / seconds, 2) if seconds > 0 else 0.0,
        "ttft_ms": percentiles([s.first - s.start for s in good if s.first is not None]),
        "itl_ms": percentiles([gap for sample in good for gap in sample.gaps]),
        "e2e_ms": percentiles([sample.end - sample.start for sample in good]),
        "errors": len(load.samples) - len(good),
    }
    return ServeResult(
        report,
        Counter(sample.error for sample in load.samples if sample.error is not None),
        sum(sample.prompt_tokens for sample in good) / len(good) if good else 0.0,
        tokens / len(good) if good else 0.0,
        load.ignore_eos,
    )


async def _run(options: ServeOptions) -> ServeResult:
    load = LoadGenerator(options)
    try:
        await load.prepare()
        return summarise(load, await load.run())
    finally:
        load.pool.close()


def run_serve(options: ServeOptions) -> ServeResult:
    """Raises BenchError when the server is unreachable or rejects the first request."""
    return asyncio.run(_run(options))
