"""The result of a completion in the format of llama.cpp's server."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from llaisys.common.sampling import BAN, DRY_BREAKERS, SamplingParams
from llaisys.common.types import CompletionOutput
from llaisys.server.generation.job import Job
from llaisys.server.generation.prompts import decode
from llaisys.server.generation.timings import timings_object


def settings_object(
    params: SamplingParams,
    stream: bool,
    eos_token_ids: Iterable[int] = (),
    seed: int | None = None,
) -> dict[str, Any]:
    """Return the sampling parameters under llama.cpp's names. `seed`: of the output."""
    seed = params.seed if seed is None else seed
    banned = eos_token_ids if params.ignore_eos else ()
    values = params.to_dict()
    shared = (
        "temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma mirostat "
        "mirostat_tau mirostat_eta xtc_probability xtc_threshold dry_multiplier dry_base "
        "dry_allowed_length dry_penalty_last_n repeat_last_n presence_penalty "
        "frequency_penalty ignore_eos post_sampling_probs"
    ).split()
    return {
        **{name: values[name] for name in shared},
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if seed is None else seed,
        "typical_p": params.typical_p,
        "typ_p": params.typical_p,
        "adaptive_target": -1.0,  # off: there is no adaptive-p sampler
        "adaptive_decay": 0.9,
        "repeat_penalty": params.repetition_penalty,
        "dry_sequence_breakers": list(
            DRY_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
        ),
        "stop": list(params.stop or ()),
        "n_probs": params.logprobs or 0,
        "samplers": list(params.samplers or ()),
        "stream": stream,
        # null: a banned token, or an ignored EOS token
        "logit_bias": [
            *({"token": t, "bias": None if b == BAN else b} for t, b in params.bias_items),
            *({"token": token, "bias": None} for token in sorted(banned)),
        ],
    }


def stop_type(output: CompletionOutput) -> str:
    if output.finish_reason == "length":
        return "limit"
    if output.finish_reason != "stop":
        return "none"
    return "word" if isinstance(output.stop_reason, str) else "eos"


@dataclass(frozen=True, slots=True)
class FinalObject:
    """Makes the objects of the finished choices of a prompt."""

    job: Job
    params: SamplingParams
    prompt: str
    num_prompt_tokens: int
    eos_token_ids: frozenset[int]

    @classmethod
    async def of_prompt(
        cls, job: Job, params: SamplingParams, prompt: list[int], shows_prompt: bool = True
    ) -> Self:
        text, engine = "", job.service.engine
        if shows_prompt:  # the engine rejects a request with ids outside the vocabulary
            valid = [token for token in prompt if token < job.service.info.vocab_size]
            text = await decode(engine, valid)
        return cls(job, params, text, len(prompt), engine.inputs.eos_token_ids)

    def of(self, output: CompletionOutput, text: str, index: int) -> dict[str, Any]:
        """Return the object of a choice, without token ids and logprobs. `text`: its content."""
        stream, eos = bool(self.job.body.stream), self.eos_token_ids
        count = len(output.token_ids)
        return {
            "index": index,
            "content": text,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self.job.model,
            "tokens_predicted": count,
            "tokens_evaluated": self.num_prompt_tokens,
            "generation_settings": settings_object(self.params, stream, eos, output.seed),
            "prompt": self.prompt,
            "has_new_line": "\n" in output.text,
            "truncated": self.num_prompt_tokens + count >= self.job.max_model_len,
            "stop_type": stop_type(output),
            "stopping_word": output.stop_reason if stop_type(output) == "word" else "",
            "tokens_cached": output.num_cached_tokens,
            "timings": timings_object(output, self.num_prompt_tokens),
        }
