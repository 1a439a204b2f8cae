"""Checks and measures copies between the memory of a device and host memory. Prints one JSON object.

Both are allocated through the folder of a rank, mapped and registered, as `kvpool worker --lend --host-memory` and
engines do. On a GPU blocks are those of a model like Llama 3 8B: 16 tokens of 131,072 bytes, in 32 layers. On CPU they
are smaller.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.parts.bench_device import wait_for
from gpu.memory import Descriptor
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.gpu_worker.device import open_device
from kvpool.gpu_worker.lent_rank import memory_folder
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.lending.host_copies import HostCopies, Region
from kvpool.lending.mapped_memory import HostMemory, reserve_host_memory, reserve_memory

LAYERS: Final = 32
LAYER_BYTES: Final = {"cuda": 16 * 131_072 // LAYERS, "cpu": 4096}
"""Bytes of a block in one layer."""
RUN: Final = 256
"""Blocks of 4,096 tokens."""
NUM_BLOCKS: Final = 3 * RUN
"""Of each tier: on a GPU 1.5 GiB, of which host memory is registered in two parts."""
ACROSS_PARTS: Final = range(NUM_BLOCKS // 2 + 1, NUM_BLOCKS // 2 + 1 + RUN)
"""Slots around 1 GiB of a GPU's, where the parts meet: one transfer of 32 slots has some of both."""
ROUNDS: Final = 10
WARM_UP: Final = 2
KILLS: Final = 3
SETTLE_SECONDS: Final = 0.2
"""Long enough to see a copy that goes on after its process has exited."""

_SPAWN: Final = multiprocessing.get_context("spawn")


class Tiers:
    """Both tiers, as an engine maps them.

    Attributes:
        layers: The blocks, int8 (layers, num_blocks, bytes of a block in a layer), on the device.
        host: Host memory, int8 (num_blocks, bytes of a block).
        copies: What makes the copies.
    """

    def __init__(self, device: torch.device, descriptors: Sequence[int], *, registers: bool = True) -> None:
        """Maps both, and registers host memory with a GPU if wanted."""
        layer_bytes = LAYER_BYTES[device.type]
        size_bytes = LAYERS * NUM_BLOCKS * layer_bytes
        memory = reserve_memory(str(device), size_bytes)
        host = reserve_host_memory(str(device), size_bytes) if registers else HostMemory(size_bytes)
        for each, descriptor in zip((memory, host), descriptors, strict=True):
            each.map(descriptor)
        self._mapped = memory, host
        self.layers = memory.buffer.view(LAYERS, NUM_BLOCKS, layer_bytes)
        self.host = host.buffer.view(NUM_BLOCKS, LAYERS * layer_bytes)
        regions = [Region(layer * NUM_BLOCKS * layer_bytes, layer_bytes) for layer in range(LAYERS)]
        self.copies = HostCopies(memory.buffer, regions, self.host, NUM_BLOCKS)

    def rows(self, blocks: range) -> torch.Tensor:
        """The bytes of blocks as host memory has them, int8 (number of blocks, bytes of a block), on CPU."""
        return self.layers[:, blocks.start : blocks.stop].transpose(0, 1).flatten(1).cpu()

    def finish(self) -> None:
        """Waits for all copies, and for what uses them."""
        self.copies.wait()
        wait_for(self.layers.device)

    def close(self) -> None:
        """Unmaps both."""
        self.finish()
        for each in self._mapped:
            each.unmap()


def down(blocks: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int]]:
    """Copies to host memory."""
    return [(block, NUM_BLOCKS + slot) for block, slot in zip(blocks, slots, strict=True)]


def up(blocks: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int]]:
    """Copies from host memory."""
    return [(slot, block) for block, slot in down(blocks, slots)]


def check_contents(tiers: Tiers, slots: Sequence[int]) -> None:
    """Copies of both directions are made in order, after what was launched before and before what is launched next."""
    first, second, third = (range(start, start + RUN) for start in range(0, NUM_BLOCKS, RUN))
    tiers.layers.random_()
    was_first, was_third = tiers.rows(first) + 1, tiers.rows(third) + 1
    tiers.layers.add_(1)
    tiers.copies.make([*down(first, slots), *up(second, slots), *down(third, slots), *up(first, slots)])
    tiers.layers[:, third.start :] = 0
    tiers.finish()
    assert torch.equal(tiers.rows(second), was_first), "what was copied to host memory and back"
    assert torch.equal(tiers.rows(first), was_third), "what was copied to the same slots afterwards"
    assert torch.equal(tiers.host[list(slots)], was_third), "host memory"
    assert not tiers.rows(third).any(), "a write after the copies"


def measure(tiers: Tiers) -> dict[str, float]:
    """Bandwidth of runs of blocks in random order, from the call to the end of the copies."""
    figures: dict[str, float] = {}
    order = torch.randperm(NUM_BLOCKS).tolist()
    runs = {"1": range(1), "16": range(16), f"{RUN}": range(RUN), f"{RUN}_scattered": order[-RUN:]}
    for name, slots in runs.items():
        blocks = order[: len(slots)]
        for direction, copies in (("to_host", down(blocks, slots)), ("back", up(blocks, slots))):
            times = []
            for _ in range(WARM_UP + ROUNDS):
                begun = time.perf_counter()
                tiers.copies.make(copies)
                tiers.finish()
                times.append(time.perf_counter() - begun)
            seconds = statistics.median(times[WARM_UP:])
            figures[f"{direction}_{name}_gb_per_s"] = round(len(slots) * tiers.host.shape[1] / seconds / 1e9, 2)
            if (direction, name) == ("back", f"{RUN}"):
                figures["promotion_of_4096_tokens_ms"] = round(1000 * seconds, 2)
    return figures


def check_kills(device: torch.device, descriptors: Sequence[int]) -> dict[str, object]:
    """A process is killed while it copies: then it writes no more, what it read is intact, and a successor copies."""
    tiers = Tiers(device, descriptors)
    sources, targets = range(RUN), range(RUN, 2 * RUN)
    for kill in range(KILLS):
        tiers.layers.random_()
        tiers.host.zero_()
        expected = tiers.rows(sources)
        process, pipe = _started(_copy_forever, device, descriptors)
        pipe.recv()
        time.sleep(0.01 * kill)  # each kill meets another part of the copies
        process.kill()
        process.join()
        assert tiers.host.any(), "the process copied"
        tiers.host.zero_()
        tiers.layers[:, targets.start : targets.stop] = 0
        wait_for(device)
        time.sleep(SETTLE_SECONDS)
        assert not tiers.host.any(), "a process that had exited wrote to host memory"
        assert not tiers.rows(targets).any(), "a process that had exited wrote to the device"
        successor, _ = _started(_copy_once, device, descriptors)
        successor.join()
        assert successor.exitcode == 0, "the successor copied"
        for found in (tiers.rows(sources), tiers.host[:RUN], tiers.rows(targets)):
            assert torch.equal(found, expected), "contents after a kill"
    tiers.close()
    return {"kills_during_copies": KILLS}


def _started(
    target: Callable[..., None], device: torch.device, descriptors: Sequence[int]
) -> "tuple[BaseProcess, Connection[Any, Any]]":
    """Starts a process that maps both tiers."""
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(device, [*map(Descriptor, descriptors)], there), daemon=True)
    process.start()
    there.close()
    return process, here


def _copy_forever(device: torch.device, descriptors: Sequence[int], pipe: "Connection[Any, Any]") -> None:
    tiers = _mapped(device, descriptors)
    while True:
        for _ in range(4):  # so that a kill meets copies that are launched
            tiers.copies.make(COPIES)
        tiers.finish()
        pipe.send(None)


def _copy_once(device: torch.device, descriptors: Sequence[int], _: "Connection[Any, Any]") -> None:
    tiers = _mapped(device, descriptors)
    tiers.copies.make(COPIES)
    tiers.finish()


def _mapped(device: torch.device, descriptors: Sequence[int]) -> Tiers:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Tiers(device, descriptors)


COPIES: Final = [*down(range(RUN), range(RUN)), *up(range(RUN, 2 * RUN), range(RUN))]
"""What a killed process and its successor copy."""


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = open_device(parser.parse_args().device)
    size_bytes = LAYERS * NUM_BLOCKS * LAYER_BYTES[device.type]
    figures: dict[str, object] = {"bytes_of_a_block": size_bytes // NUM_BLOCKS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        settings = WorkerSettings("unix:/none", "gpu-checks", 0, 1, RankGroupOptions(64), str(device))
        folder = memory_folder(settings, Path(root))
        descriptors = folder.create(size_bytes, size_bytes)
        for name in ("registered", "not_registered") if device.type == "cuda" else ("not_registered",):
            tiers = Tiers(device, descriptors, registers=name == "registered")
            if tiers.host.is_pinned() is (name == "registered"):
                check_contents(tiers, ACROSS_PARTS)
                check_contents(tiers, torch.randperm(NUM_BLOCKS)[:RUN].tolist())
                figures[name] = measure(tiers)
            else:
                figures[f"{name}_lacks"] = "CUDA refuses to register host memory"
            tiers.close()
        figures |= check_kills(device, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        folder.delete()
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
