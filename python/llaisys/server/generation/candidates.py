"""`best_of` and beam search: more candidates than the choices that are returned."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import CompletionOutput, RequestOutput
from llaisys.engine.beam_search import BeamSearch, BeamSearchParams
from llaisys.server.generation.generation import Generation
from llaisys.server.schemas.sampling import SamplingFields


async def search_beams(
    generation: Generation,
    body: SamplingFields,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    max_model_len: int,
    visible_ids: frozenset[int],
    lora: str | None,
) -> list[RequestOutput]:
    engine, name, started = generation.engine, generation.public_ids[0], time.monotonic()
    stops = frozenset(params.stop_token_ids or ())
    if not params.ignore_eos:
        stops |= engine.inputs.eos_token_ids
    salt = body.cache_salt if body.reuse_prefix is not False else f"once:{uuid.uuid4().hex}"
    options: dict[str, Any] = {"cache_salt": salt, "lora": lora, "request_id": name}
    searches = []
    for prompt in prompts:
        room = max_model_len - len(prompt)
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        beams = BeamSearchParams(
            body.num_candidates,
            max(1, most),
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        searches.append(BeamSearch(prompt, beams, stops, params.logprobs or 0))
    generation.budget.begin(sum(map(len, prompts)))
    while active := [search for search in searches if search.beams]:
        step = active[0].step_params
        if params.timeout is not None:
            left = params.timeout - (time.monotonic() - started)
            step = step.clone(timeout=max(1e-3, left))
        running = [prompt for search in active for prompt in search.prompts()]
        found = iter(await generation.run_step(running, step, **options))
        generation.budget.spend(len(running))
        for search in active:
            search.advance([next(found) for _ in search.beams])

    def text_of(tokens: Sequence[int]) -> str:
        shown = {"visible_ids": visible_ids} if visible_ids else {}
        text = engine.require_tokenizer().detokenizer(params.skip_special_tokens, **shown)
        return str(text.add_all(list(tokens)) + text.finish())

    seconds = time.monotonic() - started
    outputs = [search.output(name, params.n, text_of, seconds) for search in searches]
    generation.finish(outputs)
    return [without_logprobs(output, params) for output in outputs]


def candidate_params(body: SamplingFields, params: SamplingParams) -> SamplingParams:
    """Return the parameters of all choices that are computed, with `best_of` more than `n`."""
    if body.num_candidates == params.n:
        return params
    return params.clone(n=body.num_candidates, logprobs=params.logprobs or 0)


def best_choices(outputs: list[RequestOutput], params: SamplingParams) -> list[RequestOutput]:
    """Keep the `n` choices with the highest logprob per token of each prompt."""
    if all(len(output.outputs) == params.n for output in outputs):
        return outputs

    def mean(choice: CompletionOutput) -> float:
        return (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids))

    for output in outputs:
        output.outputs = sorted(output.outputs, key=mean, reverse=True)[: params.n]
        for index, choice in enumerate(output.outputs):
            choice.index = index
    return [without_logprobs(output, params) for output in outputs]


def without_logprobs(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Remove logprobs that were computed for the ranking only."""
    if params.logprobs is None:
        for choice in output.outputs:
            choice.logprobs = None
    return output
