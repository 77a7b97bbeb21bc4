"""Prefill and decode on different replicas: which prompts a prefill replica computes, and the
message for it.

The first `prefill_replicas` replicas compute long prompts (`max_tokens` 0) and publish their KV
blocks; a decode replica fetches the blocks and generates the answer (`engine/kv_transfer`). Every
replica can do both: without a decode replica the prefill replicas serve whole requests.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from llaisys.server.engine_client.messages import Submit

SUFFIX = "#kv"  # of the ids of prefill requests; no other id ends with it
KEPT_PARAMS = ("timeout", "priority")  # sampling parameters of the prefill request


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The roles of the replicas. `num_prefill` 0: every replica prefills and decodes."""

    num_prefill: int
    threshold: int  # uncached prompt tokens from which on a prefill replica is used

    def decoders(self, alive: Collection[int]) -> Collection[int]:
        """Return the replicas that can answer requests."""
        return [index for index in alive if index >= self.num_prefill] or alive

    def prefillers(self, alive: Collection[int], decoder: int) -> list[int]:
        """Return the replicas that can compute a prompt for `decoder`."""
        return [index for index in alive if index < self.num_prefill and index != decoder]

    def wants_prefill(self, submit: Submit, cached: int) -> bool:
        """Whether a prefill replica computes a prompt of which the decode replica has `cached`
        tokens. Adapters may differ between replicas while they change."""
        sampling = submit.sampling
        needs_all = sampling.get("prompt_logprobs") is not None or "pooling" in sampling
        is_long = len(submit.prompt_token_ids) - cached >= self.threshold
        return is_long and not submit.lora and not needs_all and sampling.get("max_tokens") != 0


def prefill_of(submit: Submit) -> Submit:
    """Return the request that computes the prompt of `submit` and publishes its KV blocks."""
    sampling = {name: submit.sampling[name] for name in KEPT_PARAMS if name in submit.sampling}
    name = submit.group + SUFFIX
    return msgspec.structs.replace(
        submit,
        group=name,
        request_ids=[name],
        sampling={**sampling, "max_tokens": 0},
        stop_token_ids=frozenset(),
        bad_words=(),
        dry_breakers=(),
        thinking=(),
        constrain_after=-1,
        reports_progress=False,
        kv_export=True,
        kv_source="",
    )


def decode_of(submit: Submit, kv_address: str) -> Submit:
    """Return the request that continues after its prefill. The time of the prefill does not count
    as waiting. `kv_address`: of the prefill replica; empty: it has failed."""
    waited = time.monotonic() - submit.arrival_time
    timeout = None if submit.queue_timeout is None else submit.queue_timeout + waited
    source = f"{submit.group}{SUFFIX}@{kv_address}" if kv_address else ""
    return msgspec.structs.replace(submit, queue_timeout=timeout, kv_source=source)
