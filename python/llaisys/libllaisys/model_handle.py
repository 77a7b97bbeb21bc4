"""`Model`: owner of a native model and wrapper of models/model.h."""

import ctypes
from collections.abc import Sequence
from typing import Any

from llaisys.libllaisys import types
from llaisys.libllaisys.handles import Handle, Tensor, output_of
from llaisys.libllaisys.library import check, error_from, last_error, lib
from llaisys.libllaisys.types import (
    LlaisysLogprobs,
    LlaisysModelCreateParams,
    LlaisysProfile,
    LlaisysSamplingMetadata,
    LlaisysStepInput,
)


def scratch_bytes(
    params: LlaisysModelCreateParams, n_outputs: int, max_loras: int = 0, max_rank: int = 0
) -> int:
    """Device bytes of the activations and logits of a model that is not created."""
    params.struct_size = ctypes.sizeof(params)
    arguments = (ctypes.byref(params), n_outputs, max_loras, max_rank)
    return int(output_of(ctypes.c_int64, "llaisysModelScratchBytes", *arguments))


def lora_bytes(params: LlaisysModelCreateParams, max_loras: int, max_rank: int) -> int:
    """Device bytes that `reserve_lora` of a model that is not created allocates."""
    params.struct_size = ctypes.sizeof(params)
    arguments = (ctypes.byref(params), max_loras, max_rank)
    return int(output_of(ctypes.c_int64, "llaisysModelLoraBytes", *arguments))


class Model(Handle):
    """A model handle; failed calls raise exceptions."""

    _destroy = "llaisysModelDestroy"

    def __init__(self, params: LlaisysModelCreateParams) -> None:
        params.struct_size = ctypes.sizeof(params)
        handle = lib().llaisysModelCreate(ctypes.byref(params))
        if not handle:
            raise error_from(lib().llaisysLastErrorCode(), last_error())
        super().__init__(handle)
        self._logprobs = LlaisysLogprobs()  # reused: read per row and step
        self._logprobs_pointer = ctypes.byref(self._logprobs)

    @property
    def params(self) -> LlaisysModelCreateParams:
        """The effective parameters, with defaults; its strings live as long as the model."""
        params = LlaisysModelCreateParams()
        check(lib().llaisysModelParams(self.handle, ctypes.byref(params)))
        return params

    def replace_weight(
        self, field: str, layer: int, tensor: Tensor, *also: tuple[str, int]
    ) -> None:
        """Transfer a tensor to a weight field, and share it with those of `also` (tied weights).

        The model owns it afterwards; if the first field rejects it, the caller does. It never has
        two owners, even after an interrupt.
        """
        model, given = self.handle, tensor.handle
        tensor.release_ownership()
        replace = lib().llaisysModelReplaceWeight
        code = replace(model, field.encode(), layer, given)
        if code != types.OK:
            tensor.regain_ownership(given)
        check(code)
        for other_field, other_layer in also:
            check(replace(model, other_field.encode(), other_layer, given))

    def reserve_lora(self, max_loras: int, max_rank: int) -> None:
        """Replace the LoRA slots by empty ones; 0: none."""
        check(lib().llaisysModelReserveLora(self.handle, max_loras, max_rank))

    def call(self, function: str, *arguments: Any) -> None:
        """Call llaisysModel`function` of this model."""
        check(getattr(lib(), f"llaisysModel{function}")(self.handle, *arguments))

    def step(self, step: LlaisysStepInput) -> None:
        step.struct_size = ctypes.sizeof(step)
        check(lib().llaisysModelStep(self.handle, ctypes.byref(step)))

    def launch(self, step: LlaisysStepInput, sampling: LlaisysSamplingMetadata) -> int:
        """Launch a step and return its ticket; the arguments' arrays must live until `collect`."""
        step.struct_size, sampling.struct_size = ctypes.sizeof(step), ctypes.sizeof(sampling)
        ticket = ctypes.c_int64()
        inputs = (ctypes.byref(step), ctypes.byref(sampling))
        check(lib().llaisysModelLaunch(self.handle, *inputs, ctypes.byref(ticket)))
        return ticket.value

    def collect(self, ticket: int, ids_address: int) -> bool:
        """Wait for a launched step; False: skipped because the previous step failed."""
        code = lib().llaisysModelCollect(self.handle, ticket, ids_address)
        if code == types.DECODE_ABORTED:
            return False
        check(code)
        return True

    def collected_logprobs(self, index: int) -> LlaisysLogprobs:
        """Valid until the next call of this or `logprobs`."""
        check(lib().llaisysModelCollectedLogprobs(self.handle, index, self._logprobs_pointer))
        return self._logprobs

    @property
    def n_outputs(self) -> int:
        return int(lib().llaisysModelNOutputs(self.handle))

    @property
    def output_ids_address(self) -> int:
        """int32 [n_outputs], valid until the next step."""
        return int(lib().llaisysModelOutputIds(self.handle) or 0)

    @property
    def logits_address(self) -> int:
        """float [n_outputs, vocabulary], valid until the next step."""
        return int(lib().llaisysModelGetLogits(self.handle) or 0)

    def logits_row_address(self, row: int) -> int:
        """float [vocabulary] of one output row, valid until the next step."""
        address = lib().llaisysModelGetLogitsIth(self.handle, row)
        if not address:
            raise IndexError(f"there is no output row {row}")
        return int(address)

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """From the next step on; see llaisysModelKeepHidden."""
        array = (ctypes.c_int32 * len(layers))(*layers)
        check(lib().llaisysModelKeepHidden(self.handle, array, len(layers)))

    @property
    def hidden_address(self) -> int:
        """float [n_tokens, captured size], valid until the next step; 0: none captured."""
        return int(lib().llaisysModelGetHidden(self.handle) or 0)

    def sample(self, sampling: LlaisysSamplingMetadata, ids_address: int) -> None:
        sampling.struct_size = ctypes.sizeof(sampling)
        check(lib().llaisysModelSample(self.handle, ctypes.byref(sampling), ids_address))

    def logprobs(self, index: int) -> LlaisysLogprobs:
        """Valid until the next call of this or `collected_logprobs`."""
        check(lib().llaisysModelLogprobs(self.handle, index, self._logprobs_pointer))
        return self._logprobs

    def profile(self, reset: bool = False) -> LlaisysProfile:
        profile = LlaisysProfile(struct_size=ctypes.sizeof(LlaisysProfile))
        check(lib().llaisysModelProfile(self.handle, ctypes.byref(profile), int(reset)))
        return profile

    def sample_counts(self) -> tuple[int, int]:
        """Rows sampled on the device, and on the host from whole logits rows."""
        on_device = ctypes.c_int64()
        arguments = (self.handle, ctypes.byref(on_device))
        on_host = output_of(ctypes.c_int64, "llaisysModelSampleCounts", *arguments)
        return on_device.value, on_host
