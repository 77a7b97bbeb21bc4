"""Whether two models mean the same by a token id."""

from __future__ import annotations

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.tokenization import Tokenizer


def check_same_vocabulary(model: Checkpoint, draft: Checkpoint) -> bool:
    """Whether both have tokenizers by which to tell; ModelLoadError when these differ. Rows behind
    the last token, which some models have for padding, do not count."""
    sources = model.tokenizer_source, draft.tokenizer_source
    if any(source.directory is None and source.vocabulary is None for source in sources):
        return False
    if sources[0] == sources[1]:
        return True
    ours, theirs = (Tokenizer.from_source(source) for source in sources)
    for token_id in range(min(ours.vocab_size, theirs.vocab_size)):
        first, second = ours.token_text(token_id), theirs.token_text(token_id)
        if first is not None and second is not None and first != second:
            raise ModelLoadError(
                f"{draft.where}: a draft model must have the vocabulary of the model; token "
                f"{token_id} is {second!r}, and {first!r} in {model.where}"
            )
    return True
