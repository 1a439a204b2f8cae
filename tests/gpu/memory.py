"""Checks memory that processes share on a device, and what remains of it when they die. Prints one JSON object.

Each check allocates through the folder of a rank and maps through a descriptor, as `kvpool worker --lend` and engines
do. On CUDA the writes are kernels that are queued when a process is killed.
"""

import argparse
import json
import multiprocessing
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, recv_handle, send_handle
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from benchmarks.parts.bench_device import wait_for
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.gpu_worker.device import device_memory, open_device
from kvpool.gpu_worker.lent_rank import memory_folder
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.lending.mapped_memory import reserve_memory

SIZE_BYTES = 64 * 2**20
MAPS = 20
KILLS = 5
QUEUED_WRITES = 200
WRITES_OF_A_KILLED_PROCESS = 2000
"""More than a GPU runs while the process is killed."""
SETTLE_SECONDS = 0.2
SLACK_BYTES = 4 * 2**20
"""What a driver may keep for its own books."""

_SPAWN = multiprocessing.get_context("spawn")
_Pipe: TypeAlias = "Connection[Any, Any]"


class Place:
    """A device, and the folder of a rank's memory."""

    def __init__(self, device: torch.device, root: Path) -> None:
        self.device = device
        self._root = root
        settings = WorkerSettings("unix:/none", "gpu-checks", 0, 1, RankGroupOptions(64), str(device))
        self.folder = memory_folder(settings, root)

    def map(self, descriptor: int) -> torch.Tensor:
        """Maps memory as words that hold counts."""
        return _mapped(self.device, descriptor)

    def used_bytes(self) -> int:
        """Memory in use on the device, over all processes."""
        if self.device.type == "cpu":
            return shutil.disk_usage(self._root).used
        torch.cuda.empty_cache()
        query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={self.device.index}"]
        return int(subprocess.check_output(["nvidia-smi", *query], text=True)) * 2**20  # noqa: S607

    def settles_at(self, used_bytes: int) -> int:
        """Waits until no more memory is in use than before; returns how much more it is."""
        deadline = time.monotonic() + 10
        while (more := self.used_bytes() - used_bytes) > SLACK_BYTES and time.monotonic() < deadline:
            time.sleep(0.05)
        assert more <= SLACK_BYTES, f"{more} bytes more in use than before"
        return more


def shares(place: Place) -> dict[str, object]:
    """What one process writes another reads, in both directions; fresh memory is zero."""
    return _share_with(place, place.device)


def other_numbers(place: Place) -> dict[str, object]:
    """So it is if the other process numbers the devices in another order, and names them by UUID."""
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    this = place.device.index or 0
    there = torch.device(f"cuda:{len(uuids) - 1}") if place.device.type == "cuda" else place.device
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(
            "CUDA_VISIBLE_DEVICES", ",".join([*uuids[:this], *uuids[this + 1 :], *uuids[this : this + 1]])
        )
        _share_with(place, there)
    return {"device_in_a_process_with_other_numbers": str(there)}


def _share_with(place: Place, there: torch.device) -> dict[str, object]:
    (descriptor,) = place.folder.create(SIZE_BYTES)
    memory = place.map(descriptor)
    assert not memory.any(), "fresh memory is zero"
    memory[: len(memory) // 2] = 7
    wait_for(place.device)
    with _child(_answer, there, descriptor) as (_, pipe):
        assert pipe.recv() == [7, 0], "what this process wrote"
        pipe.send(9)
        pipe.recv()
        assert memory[[0, -1]].tolist() == [7, 9], "what the other process wrote"
        pipe.send(None)
    os.close(descriptor)
    return {}


def _answer(device: torch.device, memory: torch.Tensor, pipe: _Pipe) -> None:
    pipe.send(memory[[0, -1]].tolist())
    memory[-1] = pipe.recv()
    wait_for(device)
    pipe.send(None)
    pipe.recv()


def exited_writers(place: Place) -> dict[str, object]:
    """A killed process writes until it has exited, and not afterwards; its kernels are queued or run when it dies."""
    (descriptor,) = place.folder.create(SIZE_BYTES)
    memory = place.map(descriptor)
    times = []
    for kill in range(KILLS):
        before = int(memory[0])
        with _child(_write_forever, place.device, descriptor) as (process, pipe):
            pipe.recv()
            time.sleep(0.01 * kill)
            exited = os.pidfd_open(process.pid or 0)
            os.kill(process.pid or 0, signal.SIGKILL)
            start = time.monotonic()
            select.select([exited], [], [])
            times.append(time.monotonic() - start)
            at_exit = memory.clone()
            os.close(exited)
        wait_for(place.device)
        assert int(at_exit[0]) > before, "the process wrote"
        time.sleep(SETTLE_SECONDS)
        assert torch.equal(memory, at_exit), "a process that had exited wrote"
    os.close(descriptor)
    times_ms = [1000 * seconds for seconds in times]
    return {
        "kills_of_a_writer": KILLS,
        "ms_until_exit_p50": round(statistics.median(times_ms), 1),
        "ms_until_exit_max": round(max(times_ms), 1),
    }


def _write_forever(device: torch.device, memory: torch.Tensor, pipe: _Pipe) -> None:
    memory.add_(1)
    wait_for(device)
    pipe.send(None)
    while True:
        for _ in range(WRITES_OF_A_KILLED_PROCESS):
            memory.add_(1)
        wait_for(device)


def dead_owner(place: Place) -> dict[str, object]:
    """Memory outlives the process that allocated it, which is killed while its kernels run: the next one finds it.

    Meanwhile only a process without the device holds the descriptor.
    """
    here, there = _SPAWN.Pipe()
    used_bytes = place.used_bytes()
    with tempfile.TemporaryDirectory() as root:
        process = _SPAWN.Process(target=_own, args=(place.device, Path(root), there))
        process.start()
        descriptor = recv_handle(here)
        memory = place.map(descriptor)
        here.recv()
        process.kill()
        process.join()
        written = memory.clone()
        assert written.all(), "the owner wrote"
        del memory
        os.close(descriptor)
        successor = Place(place.device, Path(root))
        (descriptor,) = successor.folder.open()
        memory = successor.map(descriptor)
        assert torch.equal(memory, written), "the memory outlives its owner"
        memory.add_(1)
        wait_for(place.device)
        del memory, written
        os.close(descriptor)
        successor.folder.delete()
    return {"bytes_more_after_the_owners_death": place.settles_at(used_bytes)}


def _own(device: torch.device, root: Path, pipe: _Pipe) -> None:
    place = Place(device, root)
    (descriptor,) = place.folder.create(SIZE_BYTES)
    send_handle(pipe, descriptor, os.getppid())
    _write_forever(device, place.map(descriptor), pipe)


def unmap_under_load(place: Place) -> dict[str, object]:
    """Memory that queued kernels use stays mapped until they have run."""
    (descriptor,) = place.folder.create(SIZE_BYTES)
    memory, other = place.map(descriptor), place.map(descriptor)
    wait_for(place.device)
    side = torch.cuda.Stream(place.device) if place.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(QUEUED_WRITES):
            memory.add_(1)
    start = time.monotonic()
    del memory
    seconds = time.monotonic() - start
    assert other.eq(QUEUED_WRITES).all(), "all queued writes happened"
    os.close(descriptor)
    return {"queued_writes": QUEUED_WRITES, "ms_of_the_unmap": round(1000 * seconds, 2)}


def out_of_memory(place: Place) -> dict[str, object]:
    """What does not fit is refused and keeps nothing; then what fits is allocated."""
    used_bytes = place.used_bytes()
    try:
        place.folder.create(2 * device_memory(place.device).total_bytes)
    except MemoryError as error:
        refusal = str(error)
    else:
        raise AssertionError("twice the memory of the device fits")
    place.settles_at(used_bytes)
    os.close(*place.folder.create(SIZE_BYTES))
    return {"refusal": refusal}


def threads(place: Place) -> dict[str, object]:
    """A thread that has never used the device allocates, maps and unmaps."""
    done: list[int] = []

    def use() -> None:
        (descriptor,) = place.folder.create(SIZE_BYTES)
        memory = place.map(descriptor)
        done.append(int(memory.add_(1).sum()))
        os.close(descriptor)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert done == [SIZE_BYTES // 4], "the thread used the memory"
    return {}


def maps(place: Place) -> dict[str, object]:
    """Memory that was mapped and unmapped many times, by this process and others, is free again."""
    place.folder.delete()
    used_bytes = place.used_bytes()
    map_ms, unmap_ms = [], []
    for _ in range(MAPS):
        (descriptor,) = place.folder.create(SIZE_BYTES)
        start = time.monotonic()
        memory = place.map(descriptor)
        mapped = time.monotonic()
        del memory
        unmap_ms.append(1000 * (time.monotonic() - mapped))
        map_ms.append(1000 * (mapped - start))
        os.close(descriptor)
        place.folder.delete()
    (descriptor,) = place.folder.create(SIZE_BYTES)
    for _ in range(2):
        with _child(_answer, place.device, descriptor) as (_, pipe):
            pipe.recv()
            pipe.send(1)
            pipe.recv()
            pipe.send(None)
    os.close(descriptor)
    place.folder.delete()
    return {
        "maps": MAPS,
        "ms_of_a_map_p50": round(statistics.median(map_ms), 2),
        "ms_of_an_unmap_p50": round(statistics.median(unmap_ms), 2),
        "bytes_more_after_the_maps": place.settles_at(used_bytes),
    }


def under_mps(place: Place) -> dict[str, object]:
    """A process that uses the device through NVIDIA MPS gets no memory, and an error that names MPS."""
    control = shutil.which("nvidia-cuda-mps-control")
    if place.device.type == "cpu" or not control:
        return {"under_mps": "not run: no GPU" if control else "not run: no nvidia-cuda-mps-control"}
    here, there = _SPAWN.Pipe()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
        environment.setenv("CUDA_MPS_LOG_DIRECTORY", folder)
        subprocess.run([control, "-d"], check=True)
        try:
            process = _SPAWN.Process(target=_offer, args=(place.device, Path(folder), there))
            process.start()
            refusal = here.recv()
            process.join()
        finally:
            subprocess.run([control], input="quit\n", text=True, check=True)
    assert "NVIDIA MPS" in refusal, refusal
    return {"under_mps": "refused"}


def _offer(device: torch.device, root: Path, pipe: _Pipe) -> None:
    try:
        Place(device, root).folder.create(SIZE_BYTES)
    except Exception as error:  # noqa: BLE001 - the other process judges it
        pipe.send(str(error))
    else:
        pipe.send("memory was allocated")


class _child:  # noqa: N801 - a context manager
    """A process that maps the memory and calls a function with it."""

    def __init__(self, target: Callable[..., None], device: torch.device, descriptor: int) -> None:
        self._arguments = target, device, descriptor

    def __enter__(self) -> tuple[multiprocessing.process.BaseProcess, _Pipe]:
        target, device, descriptor = self._arguments
        here, there = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_map_and_call, args=(target, device, Descriptor(descriptor), there))
        self._process.start()
        there.close()
        return self._process, here

    def __exit__(self, *_: object) -> None:
        self._process.join(30)
        self._process.kill()
        self._process.join()


class Descriptor:
    """A descriptor that is passed to a process when it is started."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Any]]:
        return _received, (DupFd(self._number),)


def _received(passed: Any) -> int:
    number: int = passed.detach()
    return number


def _mapped(device: torch.device, descriptor: int) -> torch.Tensor:
    memory = reserve_memory(str(device), SIZE_BYTES)
    memory.map(descriptor)
    return memory.buffer.view(torch.int32)


def _map_and_call(target: Callable[..., None], device: torch.device, descriptor: int, pipe: _Pipe) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = _mapped(device, descriptor)
    os.close(descriptor)
    target(device, memory, pipe)


CHECKS = (shares, other_numbers, threads, unmap_under_load, out_of_memory, exited_writers, dead_owner, under_mps, maps)


def main() -> int:
    """Runs all checks; exits with 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = open_device(parser.parse_args().device)
    figures: dict[str, object] = {}
    failed = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        place = Place(device, Path(root))
        wait_for(device)
        for check in CHECKS:
            start = time.monotonic()
            try:
                figures |= check(place)
            except Exception as error:  # noqa: BLE001 - the other checks still tell something
                failed.append(check.__name__)
                sys.stderr.write(f"{check.__name__}: {type(error).__name__}: {error}\n")
            sys.stderr.write(f"{check.__name__}: {time.monotonic() - start:.2f} s\n")
        place.folder.delete()
    figures["checks"] = f"{len(CHECKS) - len(failed)} of {len(CHECKS)}"
    if failed:
        figures["failed"] = ", ".join(failed)
    sys.stdout.write(json.dumps(figures) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
