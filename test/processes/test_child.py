"""Child processes get their setup, reply, and exit with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from server_helpers import wait_for

from llaisys.common.machine_limits import resident_bytes
from llaisys.processes.channel import bind_receiver, connect_sender, decode_or_none, decoder, encode
from llaisys.processes.child import EXIT_ORPHAN, ChildProcess
from llaisys.processes.heartbeat import HeartbeatSender, LoopClock, cpu_seconds

CHILD = """
import sys, time, zmq, json
from llaisys.processes.channel import connect_sender, encode
from llaisys.processes.child import exit_with_parent
stream = sys.stdin.buffer
setup = json.loads(stream.readline())
exit_with_parent(stream, setup["socket_directory"])
socket = connect_sender(zmq.Context(), setup["output_address"], 1000)
socket.send(encode(setup["word"]))
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildProcess:
    (tmp_path / "the_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    process = ChildProcess("the_child", {"word": "hello"})
    yield process
    process.remove()


def hear(process: ChildProcess) -> str:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = bind_receiver(context, process.output_address)
    try:
        assert socket.poll(30_000)
        return decoder(str)(socket.recv())
    finally:
        socket.close()
        context.term()


@pytest.mark.parametrize("written", ["", '{"log_level": "info", "log_'])
def test_child_exits_quietly_if_its_parent_ends_before_the_setup(written: str):
    command = [sys.executable, "-m", "llaisys.server.engine_client.process"]
    result = subprocess.run(command, input=written, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (EXIT_ORPHAN, "", "")


def test_child_gets_its_setup_and_replies(child: ChildProcess):
    assert child.directory.stat().st_mode & 0o777 == 0o700
    assert hear(child) == "hello"
    child.remove()
    child.remove()
    assert child.popen.poll() is not None and not child.directory.exists()


def test_child_exits_with_its_parent_and_removes_its_sockets(child: ChildProcess):
    hear(child)
    child.popen.stdin.close()
    assert child.popen.wait(30) == EXIT_ORPHAN
    assert not child.directory.exists()


PARENT = """
import os, signal, sys, time
from llaisys.processes.child import ChildProcess
child = ChildProcess("the_child", {"word": "hello"})
os.kill(child.popen.pid, signal.SIGSTOP)
print(child.popen.pid, flush=True)
time.sleep(600)
"""


def test_stopped_child_ends_with_its_parent(tmp_path: Path, monkeypatch):
    (tmp_path / "the_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    command = [sys.executable, "-c", PARENT]
    # As the server starts its engine, or a shell its jobs: not a leader of an orphaned group.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        wait_for(lambda: state_of(pid) == "T", "the child to stop")
        parent.kill()
        parent.wait()
    wait_for(lambda: state_of(pid) in ("", "Z"), "the stopped child to end")


def state_of(pid: int) -> str:
    """State letter of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def test_failed_child_start_leaves_no_files(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("llaisys.processes.child.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("llaisys.processes.child.module_command", lambda module: ["/no/such/file"])
    with pytest.raises(OSError):
        ChildProcess("the_child", {})
    assert list(tmp_path.iterdir()) == []


def test_invalid_frames_are_discarded_and_logged(caplog):
    class Word(msgspec.Struct, tag="word"):
        text: str

    decode = decoder(Word)
    assert decode_or_none(decode, encode(Word("a"))) == Word("a")
    for frame in (b"", b"\xc1", encode({"type": "word"}), encode(["word", "a"])):
        assert decode_or_none(decode, frame) is None
    assert caplog.text.count("invalid message") == 4


def test_heartbeats_come_until_they_are_stopped(tmp_path: Path):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = bind_receiver(context, f"ipc://{tmp_path}/out")
    clock = LoopClock()
    clock.tick(busy=True)
    sender = HeartbeatSender(context, f"ipc://{tmp_path}/out", 0.001, lambda: encode(clock.age))
    ages = [decoder(float)(socket.recv()) for _ in range(3)]
    assert 0 < ages[0] < ages[1] < ages[2]
    clock.tick(busy=False)
    assert clock.age == 0.0
    sender.stop()
    socket.close()
    context.term()


def test_process_usage_is_reported():
    before = cpu_seconds()
    deadline = time.monotonic() + 30
    while cpu_seconds() == before:
        assert time.monotonic() < deadline
    assert resident_bytes() > 1 << 20


def test_sender_queues_messages_until_the_receiver_binds(tmp_path: Path):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = connect_sender(context, f"ipc://{tmp_path}/in", 1000)
    sender.send(encode("early"))
    receiver = bind_receiver(context, f"ipc://{tmp_path}/in")
    assert receiver.poll(30_000) and decoder(str)(receiver.recv()) == "early"
    sender.close()
    receiver.close()
    context.term()
