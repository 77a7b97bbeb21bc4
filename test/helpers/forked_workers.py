"""Test files in several processes at a time, by fork after the collection: test files, torch and
transformers are imported once, not once per process.

A worker takes whole files in the order of the collection. If one dies, the test that it ran has
failed, and another worker continues with the rest of its file.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

Numbers = list[int]  # of items in the order of the collection


class Worker:
    """A worker, from the side of the process that collected."""

    def __init__(self, process: int, channel: Connection) -> None:
        self.process, self.channel = process, channel
        self.left: Numbers = []  # of its files; the first one has been started


class ForkedWorkers:
    """The plugin. `check` is called in each worker at its end and returns an error or None."""

    def __init__(self, count: int, check: Callable[[], str | None]) -> None:
        self._count, self._check = count, check
        self._workers: list[Worker] = []
        self._started = 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Choose the temporary folder before a test file sets another place for such folders."""
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # what pytest does then
        numbers = range(len(session.items))
        self._files = [list(file) for _, file in groupby(numbers, lambda n: session.items[n].path)]
        try:
            for _ in range(min(self._count, len(self._files))):
                self._start(session)
            while self._workers:
                by_channel = {worker.channel: worker for worker in self._workers}
                for channel in wait(list(by_channel)):
                    assert isinstance(channel, Connection)
                    self._read(session, by_channel[channel])
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers:
                os.kill(worker.process, 9)
                os.waitpid(worker.process, 0)
        return True

    def _start(self, session: pytest.Session) -> None:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.read_global_capture()  # not once more in the fork
        ours, theirs = Pipe()
        self._started += 1
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            ours.close()
            for worker in self._workers:
                worker.channel.close()
            run_worker(session, theirs, self._started, self._check)
        theirs.close()
        self._workers.append(Worker(process, ours))

    def _read(self, session: pytest.Session, worker: Worker) -> None:
        """Handle one message of a worker, or its end."""
        hook = session.config.hook
        try:
            kind, content = worker.channel.recv()
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            _, status = os.waitpid(worker.process, 0)
            if status:
                self._replace(session, worker, os.waitstatus_to_exitcode(status))
            return
        if kind == "next":
            file = self._files.pop(0) if self._files else []
            worker.channel.send(file)
            worker.left += file
        elif kind == "started":
            worker.left = worker.left[worker.left.index(content) :]
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            text, file, line, when, nodeid = content
            message = warnings.WarningMessage(UserWarning(text), UserWarning, file, line)
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": when, "nodeid": nodeid,
                        "location": None}
            )  # fmt: skip
        else:
            session.shouldstop = content

    def _replace(self, session: pytest.Session, worker: Worker, status: int) -> None:
        """Report the death of a worker and continue with the tests that it left."""
        if not worker.left:
            session.shouldstop = f"a worker ended with status {status}"
            return
        dead, *left = session.items[worker.left[0]], *worker.left[1:]
        report = pytest.TestReport(
            dead.nodeid, dead.location, {}, "failed",
            f"the process ended with status {status} during this test", "call",
        )  # fmt: skip
        session.config.hook.pytest_runtest_logreport(report=report)
        if left:
            self._files.insert(0, left)
        if self._files:
            self._start(session)


# ---- in a worker -------------------------------------------------------------------------------


class Sender:
    """The plugin of a worker: its reports and warnings go to the process that collected."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config, self._channel = config, channel
        self.is_registered = False  # pytest repeats earlier warnings to a new plugin

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._channel.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        if self.is_registered:
            text, file = str(warning_message.message), warning_message.filename
            self._channel.send(("warning", (text, file, warning_message.lineno, when, nodeid)))


def run_worker(
    session: pytest.Session, channel: Connection, number: int, check: Callable[[], str | None]
) -> None:
    """Does not return."""
    status = 1
    try:
        atexit._clear()
        become_worker(session.config, channel, number)
        run_files(session.items, channel)
        if error := check():
            channel.send(("error", error))
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def become_worker(config: pytest.Config, channel: Connection, number: int) -> None:
    """Give this process its own capture and temporary folders, and no terminal."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    capture.start_global_capturing()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker{number}"
    factory._basetemp.mkdir()
    if "LLAISYS_TEST_TMP" in os.environ:  # server_helpers: where this process has its sockets
        own = tempfile.mkdtemp(prefix="w")
        os.environ["LLAISYS_TEST_TMP"] = os.environ["TMPDIR"] = tempfile.tempdir = own
    sender = Sender(config, channel)
    plugins.register(sender)
    sender.is_registered = True


def run_files(items: list[pytest.Item], channel: Connection) -> None:
    def next_file() -> Numbers:
        channel.send(("next", None))
        numbers: Numbers = channel.recv()
        return numbers

    left = next_file()
    while left:
        number, *left = left
        if not left:  # what the next file shares with this one is not torn down
            left = next_file()
        channel.send(("started", number))
        nextitem = items[left[0]] if left else None
        items[number].config.hook.pytest_runtest_protocol(item=items[number], nextitem=nextitem)
