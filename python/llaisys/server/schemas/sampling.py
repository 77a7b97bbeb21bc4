"""Fields of all requests that generate: OpenAI's, vLLM's, llama.cpp's and extensions."""

import random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from llaisys.common.lora import MAX_NAME_CHARS
from llaisys.common.options import Integer, Kind, Number
from llaisys.common.sampling import (
    ALL_LOGPROBS,
    FIELDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    SamplingParams,
)
from llaisys.common.validation import check_int, integer_limit, invalid_value
from llaisys.engine.beam_search import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY
from llaisys.engine.input_processor import MAX_SALT_CHARS, SEED_BITS
from llaisys.server.schemas.base import ModelName, Schema, Text, conflicting_field
from llaisys.server.schemas.fields import FieldNotes, Ignored
from llaisys.server.schemas.kinds import (
    UNLIMITED,
    BiasField,
    BiasPairs,
    Breakers,
    Checked,
    NewTokens,
    StopStrings,
    TopNSigma,
    TopP,
)
from llaisys.server.schemas.structured import STRUCTURED_FIELDS, structured_of, with_known_format

RequestId = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]


class StreamOptions(Schema, path="stream_options."):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage so far in every chunk
    include_obfuscation: bool | None = None  # accepted; no padding is sent


RANDOM_SEED = -1
# Fields of SamplingParams with another form in requests, or none.
SPECIAL = {"max_tokens", "logprobs", "detokenize", "seed", "pooling", "second_text"}
# Fields that accept more values over HTTP.
LENIENT: dict[str, Kind] = {
    "logit_bias": BiasField(),
    "stop": StopStrings(MAX_STOP_STRINGS, MAX_STOP_CHARS),
    "top_p": TopP(0, 1, above_low=True),
    "top_n_sigma": TopNSigma(0, 100),
    "dry_sequence_breakers": Breakers(64, 64),
}
# The other fields, under their own names.
SAMPLING_FIELDS: dict[str, Any] = {
    name: (Annotated[Any, Checked(LENIENT.get(name, about.kind))], None)
    for name, about in FIELDS.items()
    if name not in SPECIAL
}
# Aliases of `structured_outputs`.
FORMAT_FIELDS: dict[str, Any] = {
    name: (Annotated[Any, Checked(kind)], None) for name, kind in STRUCTURED_FIELDS.items()
}
TableFields: Any = create_model("TableFields", __base__=Schema, **SAMPLING_FIELDS, **FORMAT_FIELDS)
SEED = Integer(-(1 << 63), MAX_SEED)  # OpenAI allows negative seeds
NEW_TOKENS = NewTokens(0, MAX_TOKENS)
LOGPROBS = Integer(0, MAX_LOGPROBS)
ALL_OR_SOME = FIELDS["logprobs"].kind  # within --max-logprobs, see `count_logprobs`
BUDGET = FIELDS["thinking_budget"].kind


LENGTH_PENALTY = Number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
# Fields that beam search, which ranks the model's own logprobs, does not support.
NOT_IN_BEAMS = (
    *("stop", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "thinking_budget"),
    *("prompt_logprobs", "logprob_token_ids", "structured_outputs", *STRUCTURED_FIELDS),
)
MAX_SLOTS = 1 << 16
MAX_LORAS = 1024  # entries of llama.cpp's `lora` list


class LoraScale(Schema, path="lora[]."):
    """An adapter in llama.cpp's `lora` field."""

    id: int = Field(ge=0)
    scale: float


class SamplingFields(TableFields):
    """Fields of chat and completions: OpenAI's, vLLM's and extensions."""

    has_default_lora: ClassVar[bool] = False  # of llama.cpp's routes

    model: ModelName = None
    seed: Annotated[int | None, Checked(SEED)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = Field(None, max_length=1024)
    # vLLM
    cache_salt: Text | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, Checked(Integer(-1, MAX_TOKENS))] = None
    truncation_side: Literal["left", "right"] | None = None
    # Beam search with `best_of` or `n` beams; otherwise `best_of` choices, of which the `n` most
    # likely are returned.
    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, Checked(LENGTH_PENALTY)] = None
    best_of: Annotated[int | None, Checked(Integer(1, MAX_N))] = None
    # llama.cpp: slot whose prefix cache is used, with --slot-save-path
    id_slot: Annotated[int | None, Checked(Integer(-1, MAX_SLOTS - 1))] = None
    # llama.cpp, of a stream
    timings_per_token: bool | None = None  # timings in every chunk
    return_progress: bool | None = None  # prompt progress chunks before the first text
    verbose: bool | None = None  # `__verbose` in the response: prompt and settings
    # extension: the name of an adapter; or llama.cpp's list
    lora: (
        Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
        | Annotated[list[LoraScale], Field(max_length=MAX_LORAS)]
        | None
    ) = None
    reuse_prefix: bool | None = None  # False: no prefix caching for this request

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        if data.get("stream_options") is not None and not data.get("stream"):
            if notes.strict:
                raise conflicting_field("stream_options", "given", "left out unless stream is true")
            data = {name: value for name, value in data.items() if name != "stream_options"}
            notes.ignore("stream_options", Ignored.HINT)
        return super().prepare(with_known_format(data, notes), notes)

    def set_defaults(self, force_include_usage: bool, tokens_as_ids: bool) -> None:
        """Set fields without a value as the server's options say."""
        if force_include_usage and self.stream:
            self.stream_options = self.stream_options or StreamOptions(continuous_usage_stats=True)
            self.stream_options.include_usage = True
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = tokens_as_ids

    @property
    def budget(self) -> tuple[str, int] | None:
        """Name and value of the field that limits reasoning tokens."""
        limit = self.thinking_budget
        return None if limit is None else ("thinking_budget", limit)

    @property
    def num_choices(self) -> int:
        return int(self.n or 1)

    @property
    def generates(self) -> bool:
        """Whether new tokens are requested, for which the context must have room."""
        return True

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def text_chars(self) -> int:
        """Size of the values that `sampling_params` processes."""
        bias: Any = self.logit_bias
        named = bias.num_chars if isinstance(bias, BiasPairs) else 0
        return len(self.allowed_token_ids or ()) + named

    def name_tokens(self, tokenizer: Any) -> None:
        """Replace texts in `logit_bias` with token ids."""
        bias: Any = self.logit_bias
        if isinstance(bias, BiasPairs):
            super().__setattr__("logit_bias", bias.by_token(tokenizer))

    def count_logprobs(self, most: int, vocab_size: int) -> None:
        """Replace -1, which requests all logprobs, by their number. Raises InvalidInputError for
        more than `most`."""
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            given = getattr(self, name, None)
            if given is None or isinstance(given, bool):
                continue
            count = vocab_size if given == ALL_LOGPROBS else given
            if count > most:
                raise invalid_value(name, given, integer_limit(0, most))
            super().__setattr__(name, count)

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Build SamplingParams. Raises InvalidInputError with field, value and limit."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values["structured_outputs"] = structured_of(self)
        given = {name: value for name, value in values.items() if value is not None}
        if self.seed == RANDOM_SEED:  # also on a server with --seed
            given["seed"] = random.getrandbits(SEED_BITS)
        elif self.seed is not None:
            given["seed"] = self.seed % (1 << 64)  # OpenAI allows negative seeds
        most = None if max_tokens == UNLIMITED else max_tokens
        self._check_candidates()
        return SamplingParams(**given, max_tokens=most, logprobs=logprobs)

    @property
    def num_candidates(self) -> int:
        """Choices or beams to compute per prompt, of which the best are returned."""
        return max(self.num_choices, self.best_of or 1)

    def _check_candidates(self) -> None:
        name = "best_of" if self.best_of is not None else "n"
        if self.best_of is not None and self.best_of < self.num_choices:
            raise conflicting_field("best_of", self.best_of, f"at least n, {self.num_choices}")
        if not self.use_beam_search:
            if self.stream and self.num_candidates > self.num_choices:
                raise conflicting_field("stream", "true", "false when best_of is larger than n")
            return
        if self.stream:
            raise conflicting_field("stream", "true", "false with use_beam_search")
        check_int(name, self.num_candidates, 1, MAX_BEAM_WIDTH, label="the number of beams")
        for field in NOT_IN_BEAMS:
            if getattr(self, field, None) not in (None, False, (), 0):
                raise conflicting_field(field, "given", "left out with use_beam_search")
