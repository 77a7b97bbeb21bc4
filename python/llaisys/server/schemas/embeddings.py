"""Request bodies of the embedding, score and rerank routes of OpenAI, vLLM and Jina."""

from typing import Annotated, Any

from pydantic import Field

from llaisys.common.embedding import EmbeddingFormat
from llaisys.common.options import Choice, Integer
from llaisys.common.sampling import POOLINGS
from llaisys.common.validation import MAX_INT, check_count, invalid_count
from llaisys.server.schemas.base import Schema, Text, TokenId, conflicting_field
from llaisys.server.schemas.chat import CompletionRequest, TokenPrompt
from llaisys.server.schemas.kinds import Checked
from llaisys.server.schemas.sampling import RequestId

FORMATS = ("float", "base64")

Input = Text | TokenPrompt | Annotated[list[Text], Field(min_length=1)] | list[TokenPrompt]


# llama.cpp: a list of strings and token ids is one text.
Pieces = Annotated[list[TokenId | Text], Field(min_length=1)]
MixedInput = Input | Pieces | Annotated[list[Text | Pieces], Field(min_length=1)]


class PoolingRequest(Schema):
    """Fields of all embedding requests."""

    model: Text | None = Field(None, max_length=1024)
    user: Text | None = Field(None, max_length=1024)
    pooling: Annotated[str | None, Checked(Choice(POOLINGS))] = None  # ours
    # vLLM
    add_special_tokens: bool | None = None
    request_id: RequestId | None = None

    def completion(self) -> CompletionRequest:
        """Return a completion request without output tokens, for the common fields."""
        return CompletionRequest(
            model=self.model,
            user=self.user,
            request_id=self.request_id,
            prompt="",
            max_tokens=0,
            add_special_tokens=self.add_special_tokens,
        )


class EmbeddingRequest(PoolingRequest):
    input: MixedInput
    encoding_format: Annotated[str | None, Checked(Choice(FORMATS))] = None
    dimensions: Annotated[int | None, Checked(Integer(1, MAX_INT))] = None
    normalize: bool | None = None  # vLLM; False: do not normalize

    @property
    def form(self) -> EmbeddingFormat:
        return EmbeddingFormat(self.dimensions, self.normalize is not False)

    def inputs(self) -> list[str | list[int | str]]:
        return as_list("input", self.input)


class ScoreRequest(PoolingRequest):
    """One text against many, or pairs of texts."""

    text_1: Input
    text_2: Input

    def pairs(self) -> tuple[list[str | list[int | str]], list[str | list[int | str]]]:
        """Raise InvalidInputError when the numbers of texts do not match."""
        first, second = as_list("text_1", self.text_1), as_list("text_2", self.text_2)
        if len(first) not in (1, len(second)):
            raise invalid_count("text_1", len(first), "texts", f"1 or {len(second)}, as text_2")
        return first, second


class RerankDocument(Schema, path="documents[]."):
    text: Text


class RerankRequest(PoolingRequest):
    """Jina's request, or with `texts` that of Hugging Face TEI, which returns a plain list."""

    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1)] | None = None
    texts: Annotated[list[Text], Field(min_length=1)] | None = None
    return_text: bool | None = None  # beside `texts`
    top_n: Annotated[int | None, Checked(Integer(0, MAX_INT))] = None  # 0: all (vLLM)
    return_documents: bool | None = None  # Jina; False: omit the texts from the response

    def ranked(self, most: int) -> list[str]:
        """Return the texts of either field. Raises InvalidInputError unless exactly one is set,
        with `most` texts or fewer."""
        if (self.documents is None) == (self.texts is None):
            given = "left out" if self.documents is None else "given"
            raise conflicting_field("documents", given, "given exactly when texts is not")
        listed: list[Any] = self.documents or self.texts or []
        check_count("texts" if self.documents is None else "documents", len(listed), most, "texts")
        return [item if isinstance(item, str) else item.text for item in listed]


def as_list(name: str, given: Any) -> list[str | list[int | str]]:
    """Return a list of prompts from one prompt or several."""
    if isinstance(given, str) or int in map(type, given):
        return [given]
    if not given:
        raise invalid_count(name, 0, "items", "at least 1")
    return list(given)
