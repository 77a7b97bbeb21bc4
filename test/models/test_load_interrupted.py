"""Ctrl-C while a model loads: wherever it lands, nothing is freed twice and nothing stays."""

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

import llaisys
from llaisys.common.model_registry import get_adapter_class
from llaisys.libllaisys.library import lib
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.checkpoint import Checkpoint

OPTIONS = AdapterOptions(max_model_len=32, n_threads=1, kv_cache_layout="slot")
SOURCES = str(Path(llaisys.__file__).parent)
LOADER = "llaisys-load"


class Ledger:
    """Who owns each native object; a second free is noted and not done."""

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
        """What nobody freed; a model's tensors go with it, and it is the first to be made."""
        return [handle for handle, owner in self.owner.items() if owner == "caller"]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return Ledger(monkeypatch)


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
    """Open a model and close it again; `watched` is around that, and not around the header."""
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
    """Raises KeyboardInterrupt at the n-th line of this package that a thread comes to."""

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
    load(source)  # what happens once happens here
    counter = Interrupter(-1)
    load(source, watched=getattr(counter, where)())
    return counter.lines


def test_an_interrupt_at_any_line_of_the_waiting_thread_leaves_nothing(
    source: Path | None, ledger: Ledger
) -> None:
    total = lines_of(source, "in_main_thread")
    # It waits and does nothing else. A load on this thread has hundreds of lines, and a Ctrl-C
    # between the library's call and the note of who owns the weight cannot be mended there.
    assert 5 < total < 100
    for at in range(total):
        with pytest.raises(KeyboardInterrupt):
            load(source, watched=Interrupter(at).in_main_thread())
        assert ledger.faults == [] and len(ledger.left()) <= 1, f"line {at} of {total}"
        ledger.owner.clear()


def test_an_exception_at_any_line_of_the_loader_frees_nothing_twice(
    source: Path | None, ledger: Ledger
) -> None:
    """No signal reaches that thread; what is proven is the order in which ownership passes."""
    total = lines_of(source, "in_loader")
    assert total > 20
    for at in range(total):
        with pytest.raises(KeyboardInterrupt):
            load(source, watched=Interrupter(at).in_loader())
        assert ledger.faults == [], f"line {at} of {total}"


class Pressing:
    """A checkpoint at whose n-th tensor somebody presses Ctrl-C."""

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
                time.sleep(0.05)  # so that the main thread is the next to run: the load is short


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests that run in the background of a shell begin with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("source", ["gguf"], indirect=True)
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_load_early_and_frees_everything(source: Path, ledger: Ledger) -> None:
    tensors = 12
    for at in range(1, tensors):
        pressing: list[Pressing] = []

        def wrap(checkpoint: Checkpoint, at: int = at, made: list[Pressing] = pressing) -> Any:
            made.append(Pressing(checkpoint, at))
            return made[0]

        with pytest.raises(KeyboardInterrupt):
            load(source, wrap)
        assert ledger.faults == [] and ledger.left() == []
        ledger.owner.clear()


def test_a_weight_that_is_refused_is_freed_once(ledger: Ledger) -> None:
    from native_helpers import MockModel

    from llaisys.common.errors import InvalidInputError
    from llaisys.libllaisys.handles import Tensor

    with MockModel() as model, Tensor.create((3, 3), "f32") as wrong:
        with pytest.raises(InvalidInputError):
            model.replace_weight("in_embed", 0, wrong)
        assert isinstance(wrong.handle, int)
    assert ledger.faults == [] and ledger.left() == []
