"""The structs and constants of the C API; `headers` reads both from `include/`."""

from ctypes import Structure, sizeof

from llaisys.libllaisys.headers import CONSTANTS, members, mirror

ABI_VERSION = CONSTANTS["ABI_VERSION"]
MAX_DIMS = CONSTANTS["MAX_DIMS"]

DEVICES = members("DEVICE_", "type_count")
DEVICE_CPU, DEVICE_NVIDIA = DEVICES["cpu"], DEVICES["nvidia"]
DEVICE_NAMES = {**DEVICES, "cuda": DEVICE_NVIDIA}  # names accepted from callers

DTYPES = members("DTYPE_", "invalid", "count")
DTYPE_NAMES = {value: name for name, value in DTYPES.items()}
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "f8_e4m3": 1}
# Block-quantised weights: ggml types, and group-quantised types for GPTQ, AWQ and others.
QUANTISED_DTYPES = {name: code for name, code in DTYPES.items() if name not in DTYPE_BYTES}
# Dtypes of the KV cache; q8 and fp8: 8 bits with one scale per head and token.
KV_DTYPES = {name: DTYPES[name] for name in ("f32", "f16", "bf16")}
KV_DTYPES |= {"q8": DTYPES["i8"], "fp8": DTYPES["f8_e4m3"]}
KV_SCALE_BYTES = 4
LAYOUTS = members("KV_LAYOUT_")

OK = CONSTANTS["OK"]
ERROR_INVALID = CONSTANTS["ERROR_INVALID"]
ERROR_MEMORY = CONSTANTS["ERROR_MEMORY"]
ERROR_INTERNAL = CONSTANTS["ERROR_INTERNAL"]
ERROR_UNSUPPORTED = CONSTANTS["ERROR_UNSUPPORTED"]
ERROR_IO = CONSTANTS["ERROR_IO"]
DECODE_NO_KV_SLOT = CONSTANTS["DECODE_NO_KV_SLOT"]
DECODE_ABORTED = CONSTANTS["DECODE_ABORTED"]

MODEL_TYPES = members("MODEL_TYPE_")
DRAFT_HEAD_KINDS = members("DRAFT_HEAD_")
MLP_KINDS = members("MLP_")
_NORMS = members("NORM_")
NORM_KINDS = {name: _NORMS.pop(name) for name in ("rms", "layer")}
NORM_POSITIONS = _NORMS
PROBES = members("PROBE_")


@mirror
class LlaisysDataTypeTraits(Structure):
    pass


@mirror
class LlaisysKvStats(Structure):
    pass


@mirror
class LlaisysBatch(Structure):
    pass


@mirror
class LlaisysStepInput(Structure):
    pass


@mirror
class LlaisysStepBuffers(Structure):
    def __init__(self) -> None:
        super().__init__(sizeof(self))


@mirror
class LlaisysSamplingNumber(Structure):
    pass


@mirror
class LlaisysSamplingMetadata(Structure):
    pass


@mirror
class LlaisysLogprobs(Structure):
    pass


@mirror
class LlaisysDecoderMeta(Structure):
    pass


@mirror
class LlaisysDecoderWeights(Structure):
    """Tensors, or arrays of tensors by layer."""


@mirror
class LlaisysDraftHeadMeta(Structure):
    pass


@mirror
class LlaisysDraftHeadWeights(Structure):
    pass


@mirror
class LlaisysModelCreateParams(Structure):
    pass


@mirror
class LlaisysStageProfile(Structure):
    pass


@mirror
class LlaisysProfile(Structure):
    pass


STAGES = tuple(name for name, kind, *_ in LlaisysProfile._fields_ if kind is LlaisysStageProfile)
