"""LLMEngine: the engine core with text on both sides, in one process."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from llaisys.common.errors import ClosedError
from llaisys.common.request import RequestStatus
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import ModelInfo, StreamOutput, TokenUpdate
from llaisys.common.validation import invalid_value
from llaisys.engine.config import EngineConfig
from llaisys.engine.core import LORA_POLL_SECONDS, EngineCore
from llaisys.engine.executor import Executor
from llaisys.engine.executor.device_choice import resolve_device
from llaisys.engine.input_processor import InputProcessor, Messages, open_tokenizer
from llaisys.engine.output_processor import OutputOptions, OutputProcessor

logger = logging.getLogger("llaisys.engine")


class LLMEngine:
    """Runs in the process and thread of its caller. Not thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config = resolve_device(config)
        executor = self._init_executor(config)
        try:
            self.core = EngineCore(config, executor)
            info = self.core.model_info
            tokenizer = open_tokenizer(info, config.tokenizer, config.chat_template)
            self.input_processor = InputProcessor(info, tokenizer, config.seed)
            self.output_processor = OutputProcessor(tokenizer, self.input_processor.eos_token_ids)
        except BaseException:
            executor.shutdown()
            raise
        self._groups: dict[str, list[str]] = {}  # request id -> ids of its choices
        self._step_seconds = 0.0
        self._closed = False

    @staticmethod
    def _init_executor(config: EngineConfig) -> Executor:
        """Return the executor of `distributed_executor_backend` with the model loaded."""
        return Executor.get_class(config)(config)

    @property
    def model_info(self) -> ModelInfo:
        return self.core.model_info

    @property
    def tokenizer(self) -> Any:
        """None when the model has none."""
        return self.input_processor.tokenizer

    def encode_chat(self, messages: Messages, **options: Any) -> list[int]:
        return self.input_processor.encode_chat(messages, **options)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        visible_ids: frozenset[int] = frozenset(),
        lora: str | None = None,
    ) -> str:
        """Queue a prompt and return its id. After an InvalidInputError nothing is queued.

        `stream`: report text at every step, not only at the end. `visible_ids`: special tokens that
        are not skipped. `lora`: the name of a LoRA adapter.
        """
        self._check_open()
        entry = self.input_processor.process(prompt, params, request_id, cache_salt, lora)
        if entry.request_id in self._groups:
            raise invalid_value("request_id", entry.request_id, "one that is not in use")
        self.core.add_requests(entry.requests)
        self.core.wait_until_queued(entry.requests)
        self.output_processor.add(
            entry.request_id,
            entry.prompt,
            entry.params,
            entry.requests,
            stream,
            OutputOptions(visible_ids),
        )
        self._groups[entry.request_id] = [request.request_id for request in entry.requests]
        return entry.request_id

    def step(self) -> list[StreamOutput]:
        """Run one step. A worker error ends the requests of the step with reason `error`."""
        self._check_open()
        start = time.perf_counter()
        updates = self._poll_pending() if self.core.has_pending else []
        updates += self.core.step()
        outputs, stopped = self.output_processor.process(updates)
        for request_id in stopped:
            self.core.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
        self._remove_finished(outputs)
        self._step_seconds += time.perf_counter() - start
        return outputs

    def _poll_pending(self) -> list[TokenUpdate]:
        """Queue requests whose LoRA adapters were read; return the ends of those that failed."""
        if not self.core.can_step:
            time.sleep(LORA_POLL_SECONDS)
        failed = RequestStatus.FINISHED_ERROR
        return [
            TokenUpdate(request.request_id, [], failed, error=str(error))
            for requests, error in self.core.poll()
            for request in requests
        ]

    def cancel(self, request_id: str) -> list[StreamOutput]:
        """End a request, free its blocks and return its last outputs (reason `abort`). Unknown and
        finished requests are ignored."""
        self._check_open()
        updates = [
            self.core.finish_request(name, RequestStatus.FINISHED_ABORTED)
            for name in self._groups.get(request_id, ())
        ]
        outputs, _ = self.output_processor.process([u for u in updates if u is not None])
        self._remove_finished(outputs)
        self._groups.pop(request_id, None)
        return outputs

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return self.core.loras.names

    def load_lora(self, name: str, path: str, in_place: bool = False) -> None:
        """Load an adapter and wait for it; see `LoraRegistry.load`. Raises ModelLoadError."""
        self._check_open()
        lora_id = self.core.loras.load(name, path, in_place)
        while True:
            for result in self.core.loras.finished_loads():
                if result.lora_id == lora_id:
                    if result.error is not None:
                        raise result.error
                    return
            time.sleep(LORA_POLL_SECONDS)

    def unload_lora(self, name: str) -> None:
        """Make an adapter unknown; its requests continue."""
        self._check_open()
        self.core.loras.unload(name)

    def has_unfinished(self) -> bool:
        return self.core.has_unfinished()

    def stats(self) -> dict[str, Any]:
        return self.core.stats()

    def debug_state(self) -> dict[str, int]:
        """Counts of what unfinished requests hold; see `EngineCore.debug_state`."""
        own = {"groups": len(self._groups), "choices": self.output_processor.num_choices}
        return own | self.core.debug_state()

    def profile(self, reset: bool = False) -> dict[str, Any]:
        """Return the time per stage, inside the model, and outside it per step."""
        self._check_open()
        result = self.core.executor.profile(reset)
        result["step_seconds"] = self._step_seconds
        outside = self._step_seconds - result["native_seconds"]
        result["outside_native_ms_per_step"] = 1e3 * outside / max(1, result["steps"])
        if reset:
            self._step_seconds = 0.0
        return result

    def close(self) -> None:
        """Free the model; idempotent."""
        if not self._closed:
            self._closed = True
            self.core.close()

    def _remove_finished(self, outputs: list[StreamOutput]) -> None:
        for output in outputs:
            if output.output is not None:
                self._groups.pop(output.request_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
