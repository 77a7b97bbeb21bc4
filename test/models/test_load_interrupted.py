"""Ctrl-C during a model load: no double free and no leak, at any point."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import model_files
import pytest
from nightly import NIGHTLY

import llaisys
from llaisys.common.model_registry import get_adapter_class
from llaisys.libllaisys.library import lib
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.checkpoint import Checkpoint

OPTIONS = AdapterOptions(max_model_len=32, n_threads=1, kv_cache_layout="slot")
SOURCES = str(Path(llaisys.__file__).parent)
LOADER = "llaisys-load"


class OwnershipTracker:
    """Tracks the owner of each native object; records double frees instead of doing them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.owner: dict[int, str] = {}
        self.given: list[int] = []
        self.faults: list[str] = []
        for name in ("llaisysTensorCreate", "llaisysTensorMap"):
            self._watch(monkeypatch, name, lambda args, _: self._born(args[-1]._obj.value))
        self._watch(monkeypatch, "llaisysModelCreate", lambda _, handle: self._born(handle))
        self._watch(monkeypatch, "llaisysModelReplaceWeight", self._give)
        for name in ("llaisysTensorDestroy", "llaisysModelDestroy"):
            self._watch(monkeypatch, name, self._dead, before=True)

    def _watch(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        note: Callable[[Any, Any], Any],
        before: bool = False,
    ) -> None:
        real = getattr(lib(), name)

        def call(*args: Any) -> Any:
            if before:
                return real(*args) if note(args, None) else None
            result = real(*args)
            note(args, result)
            return result

        monkeypatch.setattr(lib(), name, call)

    def _born(self, handle: int) -> None:
        self.owner[handle] = "caller"

    def _give(self, args: Any, code: int) -> None:
        if code == 0:
            self.owner[args[3]] = "model"

    def _dead(self, args: Any, _: Any) -> bool:
        if self.owner.get(args[0]) != "caller":
            self.faults.append(f"freed while owned by {self.owner.get(args[0])}")
            return False
        del self.owner[args[0]]
        return True

    def left(self) -> list[int]:
        """Leaked objects; a model, always created first, frees its tensors."""
        return [handle for handle, owner in self.owner.items() if owner == "caller"]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> OwnershipTracker:
    return OwnershipTracker(monkeypatch)


@pytest.fixture(scope="module", params=["tied-safetensors", "gguf", "mock"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    directory = tmp_path_factory.mktemp(request.param)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 264}
    if request.param == "mock":
        return None
    if request.param == "gguf":
        config = model_files.tiny_config("llama", **sizes)
        model_files.write_gguf(directory / "m.gguf", config, kind="Q8_0")
    else:
        config = model_files.tiny_config(tie_word_embeddings=True, **sizes)
        model_files.write_hf_model(directory, config)
    return directory


def load(
    source: Path | None,
    wrap: Callable[[Checkpoint], Any] = lambda checkpoint: checkpoint,
    watched: AbstractContextManager[None] = nullcontext(),  # noqa: B008
) -> None:
    """Load a model and close it inside `watched`; the header is read before."""
    with ExitStack() as stack:
        checkpoint, kind = None, "mock"
        if source is not None:
            checkpoint = stack.enter_context(open_checkpoint(source))
            kind = checkpoint.config.model_type
            checkpoint = wrap(checkpoint)
        adapter_class = get_adapter_class(kind)
        with watched:
            adapter_class.load(checkpoint, OPTIONS).close()


class Interrupter:
    """Raises KeyboardInterrupt at the n-th executed line of this package in a thread."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.at:
                raise KeyboardInterrupt
        return self

    @contextmanager
    def in_main_thread(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)

    @contextmanager
    def in_loader(self) -> Iterator[None]:
        threading.settrace(self._only_inside_load)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    def _only_inside_load(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Every line below `NativeAdapter._load` on the loader's own thread."""
        if threading.current_thread().name != LOADER or frame.f_code.co_name in ("_work", "run"):
            return None
        return self(frame, event, argument)


def lines_of(source: Path | None, where: str) -> int:
    load(source)  # one-time initialization
    counter = Interrupter(-1)
    load(source, watched=getattr(counter, where)())
    return counter.lines


def test_interrupt_at_any_line_of_the_waiting_thread_leaks_nothing(
    source: Path | None, ledger: OwnershipTracker
) -> None:
    total = lines_of(source, "in_main_thread")
    # The thread only waits. A load on it would have hundreds of lines, and a Ctrl-C between the
    # native call and the record of the new owner could not be handled.
    assert 5 < total < 100
    for at in range(total):
        with pytest.raises(KeyboardInterrupt):
            load(source, watched=Interrupter(at).in_main_thread())
        assert ledger.faults == [] and len(ledger.left()) <= 1, f"line {at} of {total}"
        ledger.owner.clear()


def test_exception_at_any_line_of_the_loader_frees_nothing_twice(
    source: Path | None, ledger: OwnershipTracker
) -> None:
    """Signals never reach that thread; this checks the order of ownership transfers."""
    total = lines_of(source, "in_loader")
    assert total > 20
    for at in range(0, total, 1 if NIGHTLY else 8):
        with pytest.raises(KeyboardInterrupt):
            load(source, watched=Interrupter(at).in_loader())
        assert ledger.faults == [], f"line {at} of {total}"


class InterruptingCheckpoint:
    """A checkpoint that raises SIGINT at its n-th tensor."""

    def __init__(self, checkpoint: Checkpoint, at: int) -> None:
        self.checkpoint = checkpoint
        self.at = at
        self.opened: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def read(self, name: str, *how: Any) -> Any:
        self._count(name)
        return self.checkpoint.read(name, *how)

    def read_blocks(self, name: str, *how: Any) -> Any:
        self._count(name)
        return self.checkpoint.read_blocks(name, *how)

    def _count(self, name: str) -> None:
        if name not in self.opened:
            self.opened.add(name)
            if len(self.opened) == self.at:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(0.05)  # let the main thread run: the load is short


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore SIGINT, which a shell ignores for background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("source", ["gguf"], indirect=True)
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_a_load_and_frees_everything(source: Path, ledger: OwnershipTracker) -> None:
    tensors = 12
    for at in range(1, tensors):
        pressing: list[InterruptingCheckpoint] = []

        def wrap(
            checkpoint: Checkpoint, at: int = at, made: list[InterruptingCheckpoint] = pressing
        ) -> Any:
            made.append(InterruptingCheckpoint(checkpoint, at))
            return made[0]

        with pytest.raises(KeyboardInterrupt):
            load(source, wrap)
        assert ledger.faults == [] and ledger.left() == []
        ledger.owner.clear()


def test_rejected_weight_is_freed_once(ledger: OwnershipTracker) -> None:
    from native_helpers import MockModel

    from llaisys.common.errors import InvalidInputError
    from llaisys.libllaisys.handles import Tensor

    with MockModel() as model, Tensor.create((3, 3), "f32") as wrong:
        with pytest.raises(InvalidInputError):
            model.replace_weight("in_embed", 0, wrong)
        assert isinstance(wrong.handle, int)
    assert ledger.faults == [] and ledger.left() == []
