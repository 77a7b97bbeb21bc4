"""`LLM.beam_search`."""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.common.types import RequestOutput
from llaisys.common.validation import invalid_count, invalid_value
from llaisys.engine.beam_search import BeamSearch, BeamSearchParams
from llaisys.entrypoints.prompts import Prompt, PromptRunner, Work, as_batch


class BeamSearchCalls(PromptRunner):
    """Mixin of `LLM`."""

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """The `beam_width` most likely continuations of each prompt, best first; see
        `llaisys.engine.beam_search`."""
        if not isinstance(params, BeamSearchParams):
            raise invalid_value("params", params, "BeamSearchParams")
        info, tokenizer = self.model_info, self.tokenizer
        stops = frozenset() if params.ignore_eos else frozenset(info.eos_token_ids)
        searches = []
        for prompt in as_batch(prompts):
            ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
            if len(ids) + params.max_tokens > info.max_model_len:
                most = f"at most {info.max_model_len}"
                count = len(ids) + params.max_tokens
                raise invalid_count("prompts", count, "tokens with max_tokens", most)
            searches.append(BeamSearch(ids, params, stops))
        while active := [search for search in searches if search.beams]:
            work: list[Work] = [
                (prompt, search.step_params) for search in active for prompt in search.prompts()
            ]
            outputs = iter(self._run(work, cache_salt, False))
            for search in active:
                search.advance([next(outputs) for _ in search.beams])

        def text_of(tokens: Sequence[int]) -> str:
            return "" if tokenizer is None else str(tokenizer.decode_tokens(tokens))

        return [
            search.output(f"beams-{number}", params.beam_width, text_of)
            for number, search in enumerate(searches)
        ]
