"""The process that holds a descriptor over the death of a worker; files in memory stand for memory of a device."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.lending.memory_holder import MemoryHolder, hold_for_workers
from support.detached import detached_pid


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("memory")
    os.write(descriptor, b"prefixes")
    yield descriptor
    os.close(descriptor)


def contents(descriptor: int) -> bytes:
    return os.pread(descriptor, 100, 0)


@pytest.fixture(autouse=True)
def _mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts carry the name of its folder."""
    monkeypatch.setenv("KVPOOL_TEST_FOLDER", str(tmp_path))


def holder_pid(folder: Path) -> int:
    """The process of the holder that the test has started."""
    return detached_pid("memory_holder.py", "KVPOOL_TEST_FOLDER", str(folder))


def test_the_next_worker_finds_what_was_held(tmp_path: Path, memory: int) -> None:
    first = MemoryHolder.start(tmp_path)
    assert (first.name, first.descriptor) == ("", -1)
    first.hold("m1", memory)
    first.close()
    second = MemoryHolder.connect(tmp_path)
    assert second
    assert (second.name, contents(second.descriptor)) == ("m1", b"prefixes")
    os.close(second.descriptor)
    second.drop()
    assert MemoryHolder.connect(tmp_path) is None


_WORKER = """
import os, sys
from pathlib import Path
from kvpool.lending.memory_holder import MemoryHolder
descriptor = os.memfd_create("memory")
os.write(descriptor, b"prefixes")
holder = MemoryHolder.start(Path(sys.argv[1]))
holder.hold("m1", descriptor)
print("held", flush=True)
sys.stdin.read()
"""


def test_memory_outlives_the_process_group_of_a_killed_worker(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdout
    assert worker.stdout.readline() == b"held\n"
    os.killpg(worker.pid, signal.SIGKILL)
    worker.communicate(timeout=30)  # the output ends with the worker, although the holder lives
    found = MemoryHolder.connect(tmp_path)
    assert found
    assert contents(found.descriptor) == b"prefixes"
    os.close(found.descriptor)
    found.drop()


def test_the_holder_has_no_file_of_its_worker(tmp_path: Path, memory: int) -> None:
    os.set_inheritable(memory, True)  # noqa: FBT003 - the parameter has no name
    holder = MemoryHolder.start(tmp_path)
    pid = holder_pid(tmp_path)
    links = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    assert {link.partition(":")[0] for link in links} == {"/dev/null", "socket"}
    holder.drop()


def test_a_killed_holder_is_noticed(tmp_path: Path, memory: int) -> None:
    holder = MemoryHolder.start(tmp_path)
    pid = holder_pid(tmp_path)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"ended|Broken pipe|reset"):
        holder.hold("m1", memory)
    holder.close()
    assert MemoryHolder.connect(tmp_path) is None


def test_later_memory_replaces_earlier_memory(tmp_path: Path, memory: int) -> None:
    holder = MemoryHolder.start(tmp_path)
    other, end = os.pipe()
    holder.hold("m1", end)
    os.close(end)
    holder.hold("m2", memory)
    assert os.read(other, 1) == b"", "no process holds the earlier memory"
    os.close(other)
    holder.drop()


def test_a_folder_with_a_long_path_works(tmp_path: Path, memory: int) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    holder = MemoryHolder.start(folder)
    holder.hold("m1", memory)
    holder.drop()


def test_a_holder_without_a_worker_ends_after_a_while(tmp_path: Path, memory: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "holder"))
        listener.listen()
        thread = threading.Thread(target=hold_for_workers, args=(listener, 0.05))
        thread.start()
        holder = MemoryHolder.connect(tmp_path)
        assert holder
        holder.hold("m1", memory)
        thread.join(0.2)
        assert thread.is_alive(), "a worker is connected"
        holder.close()
        thread.join(10)
        assert not thread.is_alive()
