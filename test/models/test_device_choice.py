"""`auto` and `cuda` with fake drivers: which device is chosen, and the reason that is given."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llaisys.common.errors import InvalidInputError, NativeError
from llaisys.libllaisys import cuda_support, library, nvml
from llaisys.models import device
from llaisys.models.device import choose_device, requested_device, require_cuda


class FakeNvml:
    """NVML with a compute capability for each GPU; UUIDs are GPU-0, GPU-1, ..."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        self.capabilities = capabilities
        self.is_shut_down = False

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, found: Any) -> int:
        found._obj.value = 100 + index
        return 0 if index < len(self.capabilities) else 2

    def nvmlDeviceGetHandleByUUID(self, name: bytes, found: Any) -> int:
        index = int(name.removeprefix(b"GPU-")) if name.startswith(b"GPU-") else 99
        return self.nvmlDeviceGetHandleByIndex_v2(index, found)

    def nvmlDeviceGetCudaComputeCapability(
        self, handle: ctypes.c_void_p, major: Any, minor: Any
    ) -> int:
        major._obj.value, minor._obj.value = self.capabilities[(handle.value or 0) - 100]
        return 0

    def nvmlShutdown(self) -> int:
        self.is_shut_down = True
        return 0


class FakeLibcuda:
    def __init__(self, *capabilities: tuple[int, int], status: int = 0) -> None:
        self.capabilities, self.status = capabilities, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> int:
        value._obj.value = self.capabilities[index][attribute - 75]
        return 0


class FakeMachine:
    """What the probe can see: the package's CUDA library, NVML, libcuda, NCCL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.nvml: FakeNvml | None = None
        self.libraries: dict[str, Any] = {}
        self.cuda_file = directory / library.CUDA_LIBRARY
        self.loads = 0
        self.load_error: Exception | None = None
        self.num_native_gpus = 1
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("LLAISYS_DEVICE", raising=False)
        monkeypatch.delenv("LLAISYS_LIBRARY", raising=False)
        monkeypatch.setattr(nvml, "load_library", lambda: self.nvml)
        for module in (cuda_support,):
            monkeypatch.setattr(module.ctypes, "CDLL", self.open)
        monkeypatch.setattr(library, "is_loaded", lambda: False)
        monkeypatch.setattr(library, "_chosen", library.CPU_LIBRARY)
        monkeypatch.setattr(library, "library_path", lambda name="": self.cuda_file)
        monkeypatch.setattr(library, "preload", lambda name: None)
        monkeypatch.setattr(library, "lib", self.lib)
        monkeypatch.setattr(cuda_support, "DRIVER_DIRECTORY", directory / "driver")
        self.cuda_file.touch()

    def open(self, name: str) -> Any:
        if name not in self.libraries:
            raise OSError(f"{name}: cannot open shared object file")
        return self.libraries[name]

    def lib(self) -> Any:
        self.loads += 1
        if self.load_error is not None:
            raise self.load_error

        class Native:
            llaisysDeviceCount = staticmethod(lambda kind: self.num_native_gpus)

        return Native


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMachine:
    return FakeMachine(monkeypatch, tmp_path)


def test_cuda_is_chosen_when_everything_is_there(machine: FakeMachine) -> None:
    machine.nvml = FakeNvml((9, 0))
    choice = choose_device()
    assert (choice.device, choice.num_gpus) == ("cuda", 1)
    assert "compute capability 9.0" in choice.reason
    assert machine.loads == 1 and library.is_cuda_chosen() and machine.nvml.is_shut_down
    assert require_cuda().device == "cuda"


def test_gpus_are_found_through_libcuda_without_nvml(machine: FakeMachine) -> None:
    machine.libraries[cuda_support.LIBCUDA] = FakeLibcuda((8, 6), (8, 9))
    choice = choose_device((0, 1))
    assert (choice.device, choice.num_gpus) == ("cuda", 2) and "8.6" in choice.reason


def test_libcuda_is_asked_about_devices_that_nvml_does_not_know(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.nvml = FakeNvml((9, 0))
    machine.libraries[cuda_support.LIBCUDA] = FakeLibcuda((9, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-12ab")
    assert choose_device().device == "cuda"
    machine.libraries.clear()
    assert choose_device().reason.startswith("no NVIDIA driver")


# What the machine lacks -> a part of the reason.
LACKS = {
    "library": "this installation has no libllaisys_cuda.so",
    "driver": "no NVIDIA driver was found",
    "init": "found no usable GPU (cuInit failed with 100)",
    "gpu": "the driver reports no GPU",
    "hidden": "CUDA_VISIBLE_DEVICES hides all GPUs",
    "id": "there is no GPU 1; visible GPUs: 1",
    "old": "the GPU has compute capability 7.5; at least 8.0 is needed",
    "nccl": "libnccl.so.2, which tensor parallelism needs, was not found",
    "loaded": "already loaded the native library without CUDA",
    "broken": "cannot load the native library",
    "count": "finds no GPU that it can use",
}


@pytest.mark.parametrize("lacks", LACKS)
def test_what_is_missing_selects_the_cpu_and_refuses_cuda_in_one_sentence(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    machine.nvml = FakeNvml((9, 0))
    ids, ranks = (0,), 1
    if lacks == "library":
        machine.cuda_file.unlink()
    elif lacks == "driver":
        machine.nvml = None
    elif lacks == "init":
        machine.nvml = None
        machine.libraries[cuda_support.LIBCUDA] = FakeLibcuda(status=100)
    elif lacks == "gpu":
        machine.nvml = FakeNvml()
    elif lacks == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif lacks == "id":
        ids = (0, 1)
    elif lacks == "old":
        machine.nvml = FakeNvml((7, 5))
    elif lacks == "nccl":
        machine.nvml, ids, ranks = FakeNvml((9, 0), (9, 0)), (0, 1), 2
    elif lacks == "loaded":
        monkeypatch.setattr(library, "is_loaded", lambda: True)
    elif lacks == "broken":
        machine.load_error = NativeError("cannot load the native library: no symbol")
    else:
        machine.num_native_gpus = 0
    choice = choose_device(ids, ranks)
    assert choice.device == "cpu" and choice.num_gpus == 0 and LACKS[lacks] in choice.reason
    assert machine.loads == (lacks in ("broken", "count"))
    assert lacks == "count" or not library.is_cuda_chosen()  # the CPU library can be loaded
    with pytest.raises(InvalidInputError) as caught:
        require_cuda(ids, ranks)
    text = str(caught.value)
    assert text.startswith("device is 'cuda'; it must be cpu here: ") and LACKS[lacks] in text
    assert "\n" not in text and (caught.value.field, caught.value.value) == ("device", "cuda")


def test_remedies_name_the_command(machine: FakeMachine) -> None:
    machine.nvml = FakeNvml((9, 0), (9, 0))
    with pytest.raises(InvalidInputError, match=r"pip install 'llaisys\[cuda\]'"):
        require_cuda((0, 1), 2)
    machine.libraries[cuda_support.NCCL] = object()
    assert require_cuda((0, 1), 2).num_gpus == 2
    machine.nvml = None
    with pytest.raises(InvalidInputError, match="install the NVIDIA driver"):
        require_cuda()
    machine.cuda_file.unlink()
    with pytest.raises(InvalidInputError, match="make build CUDA=1"):
        require_cuda()
    cuda_support.DRIVER_DIRECTORY.mkdir()
    assert "though there is an NVIDIA driver" in choose_device().reason


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, None), ("", []), ("-1", []), ("0, 2", ["0", "2"]), ("1,-1,0", ["1"]), ("1,,0", ["1"])],
)
def test_visible_devices_end_at_the_first_invalid_entry(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str] | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.visible_devices() == names


def test_capability_is_that_of_the_visible_devices(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.nvml = FakeNvml((7, 0), (9, 0))
    assert choose_device().device == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert choose_device().device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert choose_device((0,)).device == "cuda" and choose_device((0, 1)).device == "cpu"


def test_an_option_for_the_cpu_is_the_reason_and_nothing_is_probed(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_cuda", None)
    assert choose_device(cpu_reason="quantization") == device.DeviceChoice("cpu", "quantization")


def test_the_environment_replaces_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAISYS_DEVICE", "cuda")
    assert [requested_device(name) for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setenv("LLAISYS_DEVICE", "")
    assert requested_device("auto") == "auto"
    monkeypatch.setenv("LLAISYS_DEVICE", "abacus")
    with pytest.raises(InvalidInputError, match="LLAISYS_DEVICE is 'abacus'"):
        requested_device("auto")


def test_the_search_is_fast_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_support, "LIBCUDA", "libcuda-of-no-machine.so.1")
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml-of-no-machine.so.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    start = time.process_time()
    assert cuda_support.find_gpus().problem == "no NVIDIA driver was found"
    assert time.process_time() - start < 0.05


def test_libraries_of_the_cuda_extra_are_loaded_latest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["cublas/lib/libcublasLt.so.12", "cu13/lib/libcublasLt.so.13", "nccl/lib/libnccl.so.2"]
    for file in files:
        path = tmp_path / "nvidia" / file
        path.parent.mkdir(parents=True)
        path.touch()
    broken: set[str] = set()
    loaded: list[str] = []

    def load(path: str) -> None:
        if Path(path).name in broken:
            raise OSError
        loaded.append(Path(path).name)

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(library.ctypes, "CDLL", load)
    for name in ("libcublasLt.so", "libnccl.so"):
        library.preload(name)
    broken.add("libcublasLt.so.13")
    library.preload("libcublasLt.so")
    assert loaded == ["libcublasLt.so.13", "libnccl.so.2", "libcublasLt.so.12"]
