"""Check that two models have the same vocabulary."""

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.tokenization import Tokenizer


def check_same_vocabulary(model: Checkpoint, draft: Checkpoint) -> bool:
    """Whether both models have tokenizers to compare; ModelLoadError when those differ. Padding
    rows of the embedding are ignored."""
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
