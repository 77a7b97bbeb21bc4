"""Request schemas of llama.cpp's server."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llaisys.common.errors import InvalidInputError
from llaisys.common.options import Integer
from llaisys.common.sampling import DEFAULT_SAMPLERS, SamplingParams
from llaisys.common.validation import check_count, invalid_count
from llaisys.server.schemas.base import ModelName, Schema, Text, TokenId, conflicting_field
from llaisys.server.schemas.chat import ChatMessage
from llaisys.server.schemas.embeddings import MixedInput, PoolingRequest, as_list
from llaisys.server.schemas.fields import FieldNotes
from llaisys.server.schemas.kinds import UNLIMITED, Checked
from llaisys.server.schemas.sampling import LOGPROBS, NEW_TOKENS, SamplingFields
from llaisys.server.schemas.tools import FUNCTION_TOOLS, ToolDefinition

# llama.cpp's sampler names; UNUSED_SAMPLERS have no effect unless a field enables them.
SAMPLER_NAMES = {"typ_p": "typical_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p"}
UNUSED_SAMPLERS = frozenset({"dry", "top_n_sigma", "infill", "adaptive_p"}) - set(DEFAULT_SAMPLERS)
MAX_RESPONSE_FIELDS = 64
MAX_PREDICT_MS = 1 << 31
MAX_INPUT_EXTRA = 1024

Piece = TokenId | Text
Prompt = Text | Annotated[list[Piece], Field(min_length=1)]


class LlamaFields(Schema):
    """A body of llama.cpp's API, whose names are aliases and hints elsewhere."""

    own_aliases: ClassVar[bool] = True


class LlamaSampling(LlamaFields, SamplingFields):
    """Fields of /completion and /infill. Without `n_predict` the context is filled."""

    has_default_lora: ClassVar[bool] = True

    max_tokens: Annotated[int | None, Checked(NEW_TOKENS, "n_predict")] = None
    n_probs: Annotated[int | None, Checked(LOGPROBS)] = None
    return_tokens: bool | None = None
    # Milliseconds after the first token; the answer then ends at its next line break.
    t_max_predict_ms: Annotated[int | None, Checked(Integer(-1, MAX_PREDICT_MS))] = None
    response_fields: Annotated[list[Text], Field(max_length=MAX_RESPONSE_FIELDS)] | None = None

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        data = dict(data)
        if isinstance(data.get("samplers"), (list, str)):
            if "dry" not in data["samplers"]:
                data.pop("dry_multiplier", None)
            data["samplers"] = map_samplers(data["samplers"])
        bias = data.get("logit_bias")
        if isinstance(bias, dict) and not all(str(key).isdigit() for key in bias):
            data["logit_bias"] = [[_token(key), value] for key, value in bias.items()]
        if isinstance(data.get("prompt"), (dict, list)):
            data["prompt"] = plain_prompt(data["prompt"])
        return super().prepare(data, notes)

    @property
    def line_seconds(self) -> float | None:
        limit = self.t_max_predict_ms
        return 1e-3 * limit if limit is not None and limit > 0 else None

    def shows(self, name: str) -> bool:
        """Whether a field of the response is requested."""
        return not self.response_fields or name in self.response_fields

    @property
    def generates(self) -> bool:
        return self.max_tokens != 0

    def to_sampling(self) -> SamplingParams:
        most = UNLIMITED if self.max_tokens is None else self.max_tokens
        return self.sampling_params(most, self.n_probs or None)


class LlamaCompletionRequest(LlamaSampling):
    """Body of /completion."""

    prompt: Text | Annotated[list[Prompt | TokenId], Field(min_length=1)]
    add_special_tokens: bool | None = None

    def prompts(self, most: int) -> list[list[int | str]]:
        """Return each prompt as a list of strings and token ids. A list with token ids is one
        prompt; a list of strings or lists has several, `most` or fewer."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [[prompt]]
        kinds = set(map(type, prompt))
        if int in kinds:
            if list in kinds:
                raise invalid_count("prompt", 1, "kinds of entries", "either prompts or pieces")
            return [list(prompt)]
        check_count("prompt", len(prompt), most, "prompts")
        return [[item] if isinstance(item, str) else list(item) for item in prompt]


def plain_prompt(given: Any) -> Any:
    """Replace llama.cpp's prompt objects with their text. Raises InvalidInputError for media."""
    if isinstance(given, list):
        return [plain_prompt(item) if isinstance(item, dict) else item for item in given]
    if not isinstance(given, dict) or not isinstance(given.get("prompt_string"), str):
        return given
    if given.get("multimodal_data"):
        raise InvalidInputError(
            "prompt.multimodal_data is given; this is a text model",
            field="prompt.multimodal_data",
            code="text_only",
        )
    return given["prompt_string"]


class InputExtra(Schema, path="input_extra[]."):
    """Another file of the project."""

    text: Text
    filename: Text | None = None


class InfillRequest(LlamaSampling):
    """Body of /infill: fill between `input_prefix` + `prompt` and `input_suffix`."""

    prompt: Text | None = None
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[InputExtra], Field(max_length=MAX_INPUT_EXTRA)] | None = None


def _token(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else key


def map_samplers(names: Any) -> list[Any]:
    """Map llama.cpp's sampler names and remove unused ones; unknown names fail validation later."""
    given = names.split(";") if isinstance(names, str) else names
    mapped = [SAMPLER_NAMES.get(name, name) if isinstance(name, str) else name for name in given]
    return [name for name in mapped if not isinstance(name, str) or name not in UNUSED_SAMPLERS]


class SlotRequest(LlamaFields):
    """Body of /slots/N?action=save or restore."""

    filename: Text = Field("", max_length=256)


class ApplyTemplateRequest(LlamaFields):
    tool_types: ClassVar[frozenset[str] | None] = FUNCTION_TOOLS

    model: ModelName = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None


class LlamaEmbeddingRequest(LlamaFields, PoolingRequest):
    """Body of /embedding: `content`, or `input` as in other APIs."""

    content: MixedInput | None = None
    input: MixedInput | None = None
    embd_normalize: Literal[-1, 2] | None = None  # -1: do not normalize

    def inputs(self) -> tuple[str, list[str | list[int | str]]]:
        """Return field name and texts. Raises InvalidInputError unless exactly one is set."""
        if (self.content is None) == (self.input is None):
            given = "left out" if self.content is None else "given"
            raise conflicting_field("content", given, "given exactly when input is not")
        name = "input" if self.content is None else "content"
        return name, as_list(name, getattr(self, name))
