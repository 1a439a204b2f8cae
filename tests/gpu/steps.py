"""Measures a scheduler's step beside a decode step of the device, and gathers from lent memory. Prints one JSON object.

The device's step has the weights and the cache of a model like Llama 3 8B on a GPU, and of a tiny one on CPU: matrix
products, a gather of each request's blocks, attention; a CUDA graph on a GPU. Its tokens mean nothing. Its cache is
mapped as an engine maps lent memory, and its block tables come from a server on this machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch
from torch.nn import functional

from benchmarks.parts.bench_device import wait_for
from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, Request, Session, connect
from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.gpu_worker.block_table import BlockTables
from kvpool.gpu_worker.device import open_device
from kvpool.gpu_worker.group_table import BlockTableOptions
from kvpool.gpu_worker.lent_rank import memory_folder
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.lending.mapped_memory import reserve_memory
from kvpool.replay.children import own_server

BATCHES = (1, 8, 64)
BLOCK_TOKENS = 16
ROUNDS = 64
"""A multiple of the tokens of a block: each request needs a block as often in all measurements."""
WARM_UP = 16
SPARE_TOKENS = 3 * (ROUNDS + WARM_UP)
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model and of what is gathered."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    context_tokens: int
    gather_bytes: int

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request at the end."""
        return (self.context_tokens + SPARE_TOKENS) // BLOCK_TOKENS + 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return max(BATCHES) * self.blocks_per_request + 1

    @property
    def cache_bytes(self) -> int:
        """Memory of all layers."""
        return 2 * 2 * self.layers * self.num_blocks * BLOCK_TOKENS * self.kv_heads * self.head_size


LLAMA_3_8B_LIKE = Sizes(32, 4096, 32, 8, 128, 14336, 128256, 1024, 4 * 2**30)
TINY = Sizes(2, 128, 4, 2, 32, 256, 512, 64, 64 * MIB)


class DecodeStep:
    """A decode step of a number of requests, ready to be launched."""

    def __init__(self, sizes: Sizes, cache: torch.Tensor, table: torch.Tensor, num_reqs: int) -> None:
        """Makes the graph.

        Args:
            sizes: The model.
            cache: bfloat16 (layers, num_blocks, 2, block tokens, kv_heads, head_size).
            table: The block table that the step reads, int32 (num_reqs, blocks).
            num_reqs: Number of requests.
        """
        device = cache.device

        def weight(inputs: int, outputs: int) -> torch.Tensor:
            return torch.randn(inputs, outputs, device=device, dtype=torch.bfloat16).mul_(inputs**-0.5)

        self._sizes, self._cache = sizes, cache
        self._table = table[:num_reqs, : sizes.context_tokens // BLOCK_TOKENS]
        self._hidden = torch.randn(num_reqs, sizes.hidden, device=device, dtype=torch.bfloat16)
        rows = sizes.heads + 2 * sizes.kv_heads
        self._layers = [
            (
                weight(sizes.hidden, rows * sizes.head_size),
                weight(sizes.heads * sizes.head_size, sizes.hidden),
                weight(sizes.hidden, 2 * sizes.intermediate),
                weight(sizes.intermediate, sizes.hidden),
            )
            for _ in range(sizes.layers)
        ]
        self._head = weight(sizes.hidden, sizes.vocabulary)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._compute()  # before the capture, libraries set themselves up
            wait_for(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._compute()

    def launch(self) -> None:
        """Launches the step; on CPU it is done afterwards."""
        if self._graph:
            self._graph.replay()
        else:
            self._compute()

    @torch.inference_mode()
    def _compute(self) -> torch.Tensor:
        sizes, hidden = self._sizes, self._hidden
        blocks = self._table.flatten().long()
        for cache, (qkv, out, up, down) in zip(self._cache, self._layers, strict=True):
            query = (hidden @ qkv).view(len(hidden), -1, sizes.head_size)[:, : sizes.heads]
            found = cache.index_select(0, blocks).view(len(hidden), -1, 2, BLOCK_TOKENS, *cache.shape[3:])
            keys, values = (found[:, :, i].flatten(1, 2).transpose(1, 2) for i in range(2))
            mixed = functional.scaled_dot_product_attention(query.unsqueeze(2), keys, values, enable_gqa=True)
            hidden = hidden + mixed.flatten(1) @ out
            gate, inner = (hidden @ up).chunk(2, -1)
            hidden = hidden + (functional.silu(gate) * inner) @ down
        return (hidden @ self._head).argmax(-1)


def measure_steps(server: str, sizes: Sizes, cache: torch.Tensor, num_reqs: int) -> dict[str, float]:
    """Measures decode steps of a number of requests, one after the other and with the next one sent ahead."""
    device = cache.device
    max_tokens = sizes.context_tokens + SPARE_TOKENS
    groups = (KVCacheGroup(FullAttentionSpec(BLOCK_TOKENS), ("layer.0",)),)
    tables = BlockTables(groups, BlockTableOptions(sizes.num_blocks, num_reqs, max_tokens, 2 * max_tokens), device)
    step = DecodeStep(sizes, cache, tables.groups[0].device_table, num_reqs)
    name = f"steps-{num_reqs}"
    with connect(server) as client:
        client.create_pool(PoolConfig(PoolName(name), sizes.num_blocks, max_tokens, groups))
        with client.open_session(name) as session:
            requests = []
            for i in range(num_reqs):
                end = i + sizes.context_tokens - i % BLOCK_TOKENS  # so that not all need a block in the same step
                requests.append(request := session.request(f"r{i}", list(range(i, end))))
                assert session.admit(request), "the prompts fit"
                tables.add_row(i, request.block_ids)
            tables.commit(num_reqs)
            rounds = Rounds(session, requests, tables, step, device)
            rounds.mean_us(rounds.answered)
            back_to_back_us, rounds.scheduler_us = fmean(rounds.scheduler_us[WARM_UP:]), []
            alone_us = rounds.mean_us(rounds.alone)
            serial_us = rounds.mean_us(rounds.serial)
            ahead_us = rounds.mean_us(rounds.ahead)
    return {
        "device_ms": round(alone_us / 1000, 3),
        "scheduler_back_to_back_us": round(back_to_back_us, 1),
        "scheduler_us": round(fmean(rounds.scheduler_us[WARM_UP:]), 1),
        "scheduler_max_us": round(max(rounds.scheduler_us[WARM_UP:]), 1),
        "block_tables_us": round(fmean(rounds.tables_us[WARM_UP:]), 1),
        "one_after_the_other_ms": round(serial_us / 1000, 3),
        "sent_ahead_ms": round(ahead_us / 1000, 3),
        "one_after_the_other_costs_percent": round(100 * (serial_us / alone_us - 1), 1),
        "sent_ahead_costs_percent": round(100 * (ahead_us / alone_us - 1), 1),
    }


class Rounds:
    """Rounds of an engine: the scheduler's step, the block tables, the device's step."""

    def __init__(
        self,
        session: Session,
        requests: Sequence[Request],
        tables: BlockTables,
        step: DecodeStep,
        device: torch.device,
    ) -> None:
        self._session = session
        self._requests = requests
        self._tables = tables
        self._step = step
        self._device = device
        self._executed = session.sequence
        self.scheduler_us: list[float] = []
        self.tables_us: list[float] = []

    def mean_us(self, call: Callable[[], object]) -> float:
        """Returns the mean time of a round: a message is sent only when a request needs a block."""
        times = []
        for _ in range(WARM_UP + ROUNDS):
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return fmean(times[WARM_UP:])

    def alone(self) -> None:
        """The device's step alone."""
        self._step.launch()
        wait_for(self._device)

    def serial(self) -> None:
        """The server answers before the device's step is launched."""
        self._commit(self.answered())
        self.alone()
        self._executed = self._session.sequence

    def answered(self) -> Sequence[Sequence[Sequence[int]]]:
        """The scheduler's step alone; returns the new blocks."""
        start = time.perf_counter()
        with self._session.step(executed_sequence=self._executed) as step:
            answer = step.decode(self._requests, [1] * len(self._requests))
        self.scheduler_us.append(1e6 * (time.perf_counter() - start))
        return answer.new_blocks

    def ahead(self) -> None:
        """The next step is sent while the device runs this one."""
        self._step.launch()
        with self._session.begin_step(executed_sequence=self._executed) as step:
            answer = step.decode(self._requests, [1] * len(self._requests))
        wait_for(self._device)
        self._session.settle()
        self._commit(answer.new_blocks)
        self._executed = self._session.sequence - 1

    def _commit(self, new_blocks: Sequence[Sequence[Sequence[int]]]) -> None:
        start = time.perf_counter()
        for row, blocks in enumerate(new_blocks):
            if any(blocks):
                self._tables.append_row(row, blocks)
        self._tables.commit(len(self._requests))
        self.tables_us.append(1e6 * (time.perf_counter() - start))


def measure_gather(mapped: torch.Tensor, plain: torch.Tensor) -> dict[str, float]:
    """Gathers a quarter of the blocks of 64 KiB, in random order, from mapped memory and from torch's."""
    device, page_bytes = mapped.device, 64 * 1024
    count = len(mapped) // page_bytes
    blocks = torch.randperm(count, device=device)[: count // 4]
    into = torch.empty(len(blocks), page_bytes // 8, dtype=torch.int64, device=device)
    times: dict[str, list[float]] = {"mapped": [], "plain": []}
    for _ in range(WARM_UP + ROUNDS):
        for name, memory in (("mapped", mapped), ("plain", plain)):
            pages = memory.view(torch.int64).view(count, -1)
            wait_for(device)
            start = time.perf_counter()
            for _ in range(4):
                torch.index_select(pages, 0, blocks, out=into)
            wait_for(device)
            times[name].append(time.perf_counter() - start)
    moved = 4 * 2 * into.nbytes
    rates = {name: moved / median(seconds[WARM_UP:]) / 1e9 for name, seconds in times.items()}
    return {
        "gather_from_mapped_gb_per_s": round(rates["mapped"], 1),
        "gather_from_torch_gb_per_s": round(rates["plain"], 1),
        "mapped_differs_percent": round(100 * (rates["mapped"] / rates["plain"] - 1), 2),
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = open_device(parser.parse_args().device)
    sizes = LLAMA_3_8B_LIKE if device.type == "cuda" else TINY
    size_bytes = max(sizes.cache_bytes, sizes.gather_bytes)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        settings = WorkerSettings("unix:/none", "gpu-checks", 0, 1, RankGroupOptions(64), str(device))
        folder = memory_folder(settings, Path(root))
        (descriptor,) = folder.create(size_bytes)
        mapped = reserve_memory(str(device), size_bytes)
        mapped.map(descriptor)
        memory = mapped.buffer.random_()
        os.close(descriptor)
        plain = memory[: sizes.gather_bytes].clone()
        figures |= measure_gather(memory[: sizes.gather_bytes], plain)
        del plain
        shape = (sizes.layers, sizes.num_blocks, 2, BLOCK_TOKENS, sizes.kv_heads, sizes.head_size)
        cache = memory[: sizes.cache_bytes].view(torch.bfloat16).view(shape).normal_()
        with own_server() as server:
            for num_reqs in BATCHES:
                figures[f"{num_reqs}_requests"] = measure_steps(server, sizes, cache, num_reqs)
        folder.delete()
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
