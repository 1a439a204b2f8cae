"""Copies of blocks between the memory of a rank and its host memory.

1. A block of the first tier lies in one or more regions of the rank's memory, and in one slot of host memory, which
   holds its bytes of all regions, region by region.
2. Copies are made in their order: a run of copies of one direction is made at once, unless it would write to a block
   twice.
3. Steps come after the copies that `make` was given before. They come after a batch of copies in the background, which
   `begin` was given, once they `join` it. Until then, no other copy writes what that batch reads or writes.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.lending.steps_in_flight import DeviceEvent

_STAGING_BYTES: Final = 64 * 2**20
"""Bytes that a run copies at most, unless a block has more: on a device, they lie side by side there."""


class Region(NamedTuple):
    """Where blocks lie: the bytes of block b begin at `offset_bytes + b * block_bytes`."""

    offset_bytes: int
    block_bytes: int


class CopyOrders(NamedTuple):
    """What copies go with a step; each has a source and a target.

    Attributes:
        before: Copies to make before the step.
        beside: Copies to begin with the step, in the background: one batch. Empty for none.
        joined: The step comes after this number of batches in the background, from the first.
    """

    before: Sequence[tuple[int, int]] = ()
    beside: Sequence[tuple[int, int]] = ()
    joined: int = 0


class CopyReport(NamedTuple):
    """What an engine's scheduler hears of the copies of a rank.

    Times of a device are without the newest copies: those that it may not have completed.

    Attributes:
        num_made: Number of batches in the background, from the first, that have been made.
        demotion_microseconds: Time that copies to host memory have taken so far.
        promotion_microseconds: Time that copies from host memory have taken so far.
    """

    num_made: int = 0
    demotion_microseconds: int = 0
    promotion_microseconds: int = 0


class _Run(NamedTuple):
    """Copies of one direction: blocks of the first tier, each with its slot of host memory."""

    demotes: bool
    blocks: list[int]
    slots: list[int]


class _OnThread:
    """Copies that a thread makes, as an event behind them."""

    def __init__(self, timed: "Future[list[tuple[_Run, float]]]") -> None:
        """Args: timed: The runs that the thread makes, with their seconds."""
        self.timed: Final = timed

    def query(self) -> bool:
        """Whether they have been made."""
        return self.timed.done()

    def synchronize(self) -> None:
        """Waits until they have. Raises what their thread has raised."""
        self.timed.result()


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
        self._host: Final = host.view(dtype)
        self._parts: list[tuple[torch.Tensor, slice]] = []
        start = 0
        for offset, block_bytes in regions:
            part = buffer[offset : offset + num_blocks * block_bytes].view(dtype).view(num_blocks, -1)
            self._parts.append((part, slice(start, start + part.shape[1])))
            start += part.shape[1]
        self._max_run: Final = max(_STAGING_BYTES // host.shape[1], 1)
        self._stream: Final = _stream(buffer.device) if buffer.is_cuda else None
        self._background: Final = _stream(buffer.device) if buffer.is_cuda else None
        self._thread: ThreadPoolExecutor | None = None
        self._batches: deque[DeviceEvent] = deque()
        """Those of `begin` that may not have been made."""
        self._num_made = 0
        self._staging: dict[torch.cuda.Stream, torch.Tensor] = {}
        self._timed: deque[tuple[_Run, Any, Any]] = deque()
        """Runs that the device may not have completed, with the events around each."""
        self._seconds = [0.0, 0.0]  # of promotions, of demotions

    @property
    def num_made(self) -> int:
        """Number of batches in the background, in the order in which they began, that have been made."""
        while self._batches and self._batches[0].query():
            batch = self._batches.popleft()
            self._num_made += 1
            if isinstance(batch, _OnThread):
                self._count(batch.timed.result())
        return self._num_made

    @property
    def report(self) -> CopyReport:
        """What the scheduler hears of the copies."""
        num_made = self.num_made
        self._count_completed()
        promotion, demotion = (int(seconds * 1e6) for seconds in self._seconds)
        return CopyReport(num_made, demotion, promotion)

    def make(self, copies: Iterable[tuple[int, int]]) -> None:
        """Makes copies in order, each a source and a target. What the current stream launches next comes after them.

        Raises:
            InvalidArgumentError: One is not between a block of each tier; none is made.
        """
        copies = self._checked(copies)
        if self._stream is None:
            self._count(self._made_here(copies))
            return
        self._launch(copies, self._stream)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._count_completed()  # so that few events are kept

    def begin(self, copies: Iterable[tuple[int, int]]) -> DeviceEvent:
        """Begins a batch of copies, as `make`, after what was launched before. Returns the event behind them.

        Raises:
            InvalidArgumentError: As `make`.
        """
        copies = self._checked(copies)
        if self._background is None:
            self._thread = self._thread or ThreadPoolExecutor(1, "kvpool-copies")
            batch: DeviceEvent = _OnThread(self._thread.submit(self._made_here, copies))
        else:
            batch = self._launch(copies, self._background)
        self._batches.append(batch)
        return batch

    def join(self, num_batches: int) -> None:
        """Has what the current stream launches next, and the next copies, come after the first batches of `begin`."""
        for batch in islice(self._batches, max(num_batches - self.num_made, 0)):
            if self._stream is None:
                batch.synchronize()
            else:
                torch.cuda.current_stream(self._stream.device).wait_event(batch)  # type: ignore[arg-type]  # is of CUDA

    def wait(self) -> None:
        """Waits until all copies have been made."""
        for stream in filter(None, (self._stream, self._background)):
            stream.synchronize()
        for batch in self._batches:
            batch.synchronize()

    def _checked(self, copies: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        copies = [*copies]
        for pair in copies:
            block, slot = sorted(pair)
            if not 0 <= block < self._num_blocks <= slot < self._num_blocks + len(self._host):
                raise InvalidArgumentError("copies", f"{pair} is not between a block of each tier")
        return copies

    def _made_here(self, copies: Iterable[tuple[int, int]]) -> list[tuple[_Run, float]]:
        """Makes copies on a CPU; returns the runs, with their seconds."""
        timed = []
        for run in self._runs(copies):
            began_seconds = time.perf_counter()
            self._copy(run, self._host, run.slots)
            timed.append((run, time.perf_counter() - began_seconds))
        return timed

    def _launch(self, copies: Iterable[tuple[int, int]], stream: torch.cuda.Stream) -> DeviceEvent:
        """Has a stream make copies after what the current stream has launched; returns the event behind them."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for run in self._runs(copies):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                self._copy_on_device(run, stream)
                end.record()
                self._timed.append((run, begin, end))
        made: DeviceEvent = stream.record_event()
        return made

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

    def _copy_on_device(self, run: _Run, stream: torch.cuda.Stream) -> None:
        """Copies through rows on the device, so that each range of slots is one transfer."""
        if stream not in self._staging:
            shape = self._max_run, self._host.shape[1]
            self._staging[stream] = torch.empty(shape, dtype=self._host.dtype, device=self._parts[0][0].device)
        rows = self._staging[stream][: len(run.blocks)]
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

    def _count_completed(self) -> None:
        while self._timed and self._timed[0][2].query():
            run, begin, end = self._timed.popleft()
            self._count([(run, begin.elapsed_time(end) / 1000)])

    def _count(self, timed: Iterable[tuple[_Run, float]]) -> None:
        for run, seconds in timed:
            self._seconds[run.demotes] += seconds


def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside that of steps, of the lowest priority, which is torch's default."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _ranges(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the consecutive slots: place of the first one, its number, and how many there are."""
    for _, each in groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
        (place, slot), *more = each
        yield place, slot, 1 + len(more)
