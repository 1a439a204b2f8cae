"""Copies of blocks between the memory of a rank and its host memory.

A block of the first tier lies in one or more regions of the rank's memory, and in one slot of host memory, which holds
its bytes of all regions, region by region. Copies are made in their order: a run of copies of one direction is made at
once, unless it would write to a block twice.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch

from kvpool.core.errors import InvalidArgumentError

_STAGING_BYTES: Final = 64 * 2**20
"""Bytes that a run copies at most, unless a block has more: on a device, they lie side by side there."""


class Region(NamedTuple):
    """Where blocks lie: the bytes of block b begin at `offset_bytes + b * block_bytes`."""

    offset_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class CopyStats:
    """What was copied so far. On a device, without the newest copies: those that it may not have completed."""

    demoted_bytes: int = 0
    demotion_seconds: float = 0.0
    promoted_bytes: int = 0
    promotion_seconds: float = 0.0


class _Run(NamedTuple):
    """Copies of one direction: blocks of the first tier, each with its slot of host memory."""

    demotes: bool
    blocks: list[int]
    slots: list[int]


class HostCopies:
    """Makes copies between the two tiers of a rank. Not thread-safe."""

    def __init__(self, buffer: torch.Tensor, regions: Iterable[Region], host: torch.Tensor, num_blocks: int) -> None:
        """Makes nothing yet.

        Args:
            buffer: Memory of the rank, int8 (size_bytes,), on any device.
            regions: Where its blocks are, in the order of a slot; their blocks have as many bytes as a slot together.
            host: Host memory, int8 (num_host_blocks, slot_bytes). A device copies fast if it is registered there.
            num_blocks: Number of blocks of the first tier. The ids from there on name slots, in order.
        """
        regions = [*regions]
        is_wide = all(count % 8 == 0 for region in regions for count in region)
        dtype = torch.int64 if is_wide else torch.int8  # torch copies element by element
        self._num_blocks: Final = num_blocks
        self._slot_bytes: Final = host.shape[1]
        self._host: Final = host.view(dtype)
        self._parts: list[tuple[torch.Tensor, slice]] = []
        start = 0
        for offset, block_bytes in regions:
            part = buffer[offset : offset + num_blocks * block_bytes].view(dtype).view(num_blocks, -1)
            self._parts.append((part, slice(start, start + part.shape[1])))
            start += part.shape[1]
        self._max_run: Final = max(_STAGING_BYTES // self._slot_bytes, 1)
        self._stream: Final = _stream(buffer.device) if buffer.is_cuda else None
        self._staging: torch.Tensor | None = None
        self._timed: deque[tuple[_Run, Any, Any]] = deque()
        """Runs that the device may not have completed, with the events around each."""
        self._bytes, self._seconds = [0, 0], [0.0, 0.0]  # of promotions, of demotions

    @property
    def stats(self) -> CopyStats:
        """What was copied so far."""
        while self._timed and self._timed[0][2].query():
            run, begin, end = self._timed.popleft()
            self._count(run, begin.elapsed_time(end) / 1000)
        return CopyStats(self._bytes[1], self._seconds[1], self._bytes[0], self._seconds[0])

    def make(self, copies: Iterable[tuple[int, int]]) -> None:
        """Makes copies in order, each a source and a target. What the current stream launches next comes after them.

        Raises:
            InvalidArgumentError: One is not between a block of each tier; none is made.
        """
        copies = [*copies]
        for pair in copies:
            block, slot = sorted(pair)
            if not 0 <= block < self._num_blocks <= slot < self._num_blocks + len(self._host):
                raise InvalidArgumentError("copies", f"{pair} is not between a block of each tier")
        if self._stream is None:
            for run in self._runs(copies):
                began_seconds = time.perf_counter()
                self._copy(run, self._host, run.slots)
                self._count(run, time.perf_counter() - began_seconds)
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for run in self._runs(copies):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                self._copy_on_device(run)
                end.record()
                self._timed.append((run, begin, end))
        current.wait_stream(self._stream)
        _ = self.stats  # so that few events are kept

    def wait(self) -> None:
        """Waits until all copies have been made."""
        if self._stream:
            self._stream.synchronize()

    def _runs(self, copies: Iterable[tuple[int, int]]) -> Iterator[_Run]:
        """Splits copies into runs. What a run reads it does not write, as that is in the other tier."""
        run, targets = _Run(demotes=False, blocks=[], slots=[]), set[int]()
        for source, target in copies:
            demotes = target >= self._num_blocks
            if run.demotes != demotes or target in targets or len(run.blocks) == self._max_run:
                if run.blocks:
                    yield run
                run, targets = _Run(demotes, [], []), set()
            block, slot = (source, target) if demotes else (target, source)
            run.blocks.append(block)
            run.slots.append(slot - self._num_blocks)
            targets.add(target)
        if run.blocks:
            yield run

    def _copy(self, run: _Run, rows: torch.Tensor, places: Sequence[int]) -> None:
        """Copies blocks to or from rows (num_rows, slot_bytes) on the same device, each at its place among these."""
        blocks, at = (self._indices(each) for each in (run.blocks, places))
        for part, columns in self._parts:
            if run.demotes:
                rows[:, columns].index_copy_(0, at, part.index_select(0, blocks))
            else:
                part.index_copy_(0, blocks, rows[:, columns].index_select(0, at))

    def _copy_on_device(self, run: _Run) -> None:
        """Copies through rows on the device, so that each range of slots is one transfer."""
        if self._staging is None:
            shape = self._max_run, self._host.shape[1]
            self._staging = torch.empty(shape, dtype=self._host.dtype, device=self._parts[0][0].device)
        rows = self._staging[: len(run.blocks)]
        if run.demotes:
            self._copy(run, rows, range(len(rows)))
        for first, slot, count in _ranges(run.slots):
            near, far = rows[first : first + count], self._host[slot : slot + count]
            (far if run.demotes else near).copy_(near if run.demotes else far, non_blocking=True)
        if not run.demotes:
            self._copy(run, rows, range(len(rows)))

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        indices = torch.tensor(values, dtype=torch.int64, pin_memory=self._stream is not None)
        return indices.to(self._parts[0][0].device, non_blocking=True)

    def _count(self, run: _Run, seconds: float) -> None:
        self._bytes[run.demotes] += len(run.blocks) * self._slot_bytes
        self._seconds[run.demotes] += seconds


def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside that of steps, of the lowest priority, which is torch's default."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _ranges(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the consecutive slots: place of the first one, its number, and how many there are."""
    for _, each in groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
        (place, slot), *more = each
        yield place, slot, 1 + len(more)
