"""Hit tokens of a trace in pools of every size, from one pass over it: a miss-ratio curve.

1. The requests play one after another, as in `play_prompts`: a request is looked up and admitted when the one before
   it has been freed. Sizes begin with the largest request, so every request is admitted.
2. Freed blocks are used again in the order in which they became free, and those of one request last block first. So a
   pool of any size holds the first blocks of one stack: newest request first, and the blocks of a request in order. A
   block at place n of the stack is hit in the pools of n blocks or more, the null block not counted. The blocks before
   it in its prompt have places before n, because each request that touches a block touches those, too.
3. A request moves the blocks that it touches to the top. What is left of an earlier request in the stack is the end of
   its blocks. So a prompt is found in few runs, and a run takes O(log requests), whatever the size of its blocks.
4. With `lru` an uncached partial block has a place as any other. With `uncached_first` it is used again first, so it
   takes a place during the next look-up alone.
5. If the last block of a prompt is full, it is computed again, though it may be cached. The pool then has copies, and a
   look-up finds the one that was cached first. Pools of different sizes hold different copies: where an earlier one is
   left, the later one stays at its place. Such a stale copy takes a place in pools of these sizes only. With it, more
   blocks can hit less: the sizes that hit a block are a list of ranges.

Rule 2 is Mattson's stack algorithm; rule 5 is where it does not hold.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import TypeAlias

from kvpool.client import ReuseOrder
from kvpool.replay.trace_formats import TraceRequest

_Sizes: TypeAlias = list[float]
"""Numbers of blocks in ranges: the first range begins at the first value and ends before the second, and so on."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The hit tokens of a trace by the number of blocks of the pool, the null block included.

    Attributes:
        requests: Number of requests.
        input_tokens: Tokens of all prompts.
        min_blocks: Smallest number of blocks to which the curve applies: those of the largest request.
        knees: Numbers of blocks between which the hit tokens are linear, ascending. After the last they are constant.
        hit_tokens: The hit tokens at these.
    """

    requests: int
    input_tokens: int
    min_blocks: int
    knees: Sequence[int]
    hit_tokens: Sequence[int]

    @property
    def max_blocks(self) -> int:
        """The number of blocks beyond which nothing more is hit."""
        return max(self.knees[-1], self.min_blocks)

    def hit_tokens_at(self, num_blocks: int) -> int:
        """Returns the hit tokens of a pool of this many blocks, at least `min_blocks`."""
        i = bisect_right(self.knees, num_blocks) - 1
        if i < 0 or i + 1 == len(self.knees):
            return self.hit_tokens[i] if i >= 0 else 0
        (low, high), (few, many) = self.knees[i : i + 2], self.hit_tokens[i : i + 2]
        return few + (many - few) * (num_blocks - low) // (high - low)

    def hit_rate_at(self, num_blocks: int) -> float:
        """Returns the share of the prompt tokens that a pool of this many blocks hits."""
        return self.hit_tokens_at(num_blocks) / self.input_tokens


def sweep(trace: Iterable[TraceRequest], block_size: int, order: ReuseOrder) -> Curve:
    """Computes the hit tokens of a trace in pools of all sizes. O(ids of the trace + runs x log requests).

    Args:
        trace: The requests.
        block_size: Tokens per block.
        order: The order in which freed blocks are used again.
    """
    stack = _Stack(block_size, order)
    requests = input_tokens = largest = 0
    for entry in trace:
        stack.play(entry)
        requests += 1
        input_tokens += entry.input_length
        largest = max(largest, -(-entry.input_length // block_size))
    bends = sorted(stack.bends.items())
    # A hit at n blocks raises the number of hits between n - 1 and n; the null block is one more.
    knees = [size for size, _ in bends] or [largest + 1]
    slopes = accumulate(bend for _, bend in bends)
    rises = [slope * (high - low) for slope, low, high in zip(slopes, knees, knees[1:], strict=False)]
    hit_tokens = [blocks * block_size for blocks in accumulate(rises, initial=0)]
    return Curve(requests, input_tokens, largest + 1, knees, hit_tokens)


@dataclass(slots=True)
class _Run:
    """Blocks [first, end) of a prompt, which request `time` touched last."""

    time: int
    first: int
    end: int


@dataclass(slots=True)
class _Found:
    """What of a prompt is in the stack.

    Attributes:
        runs: The blocks, in order, each in the place of its newest copy.
        nodes: The nodes of the prompt in which blocks end, each with the end of the prompt's blocks there.
        copied: Blocks of which there are earlier copies, each with the requests that touched these, oldest first.
    """

    runs: list[_Run] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, list[int]]] = field(default_factory=list)


class _Stack:
    """The blocks in the order of rule 2. Requests are numbered from 1, their `time`.

    A node is a prefix of whole ids of the trace. A block belongs to the node in which it ends.

    Attributes:
        bends: By number of blocks: change of the slope of the number of hit blocks.
    """

    def __init__(self, block_size: int, order: ReuseOrder) -> None:
        self.bends: defaultdict[int, int] = defaultdict(int)
        self._block_size = block_size
        self._places_partial = order is ReuseOrder.LRU
        self._num_ahead = 0  # places that an uncached block takes from all others in the next look-up: rule 4
        self._nodes: dict[tuple[int, int], int] = {}
        # By node: the requests that touched its blocks last, with the end of the blocks; newest first, ends ascending.
        self._touched: dict[int, list[tuple[int, int]]] = {}
        self._copies: dict[int, dict[int, list[int]]] = {}  # by node and block: requests that touched earlier copies
        self._stale: list[tuple[int, _Sizes]] = []  # rule 5: request after whose other blocks each is, and its sizes
        self._ends = [0]  # by request: number of its places at first
        self._left = _Counts()  # by request: number of its places that are left

    def play(self, entry: TraceRequest) -> None:
        """Counts the hits of a request, then moves its blocks to the top."""
        time, size = len(self._ends), self._block_size
        num_full, num_partial_tokens = divmod(entry.input_length, size)
        num_looked_up = (entry.input_length - 1) // size
        found = self._find(entry)
        if found.runs and found.runs[-1].end > num_looked_up:  # the last block, which becomes a copy
            last = found.runs[-1]
            earlier = self._copies.setdefault(found.nodes[-1][0], {}).setdefault(num_looked_up, [])
            earlier.append(last.time)
            last.end = num_looked_up
        self._count_hits(found.runs)
        self._remove(found, num_looked_up)
        for node, end in found.nodes:
            older = self._touched.get(node, ())
            self._touched[node] = [(time, end), *(each for each in older if each[1] > end)]
        is_placed = num_partial_tokens > 0 and self._places_partial
        self._num_ahead = int(num_partial_tokens > 0 and not is_placed)
        self._ends.append(num_full + is_placed)
        self._left.append(num_full + is_placed)

    def _find(self, entry: TraceRequest) -> _Found:
        nodes, touched, copies, size = self._nodes, self._touched, self._copies, self._block_size
        found, node, first, end_tokens = _Found(), 0, 0, 0
        for hash_id in entry.hash_ids:
            node = nodes.setdefault((node, hash_id), len(nodes) + 1)
            end_tokens += entry.id_tokens
            end = min(end_tokens, entry.input_length) // size
            if end == first:
                continue
            found.nodes.append((node, end))
            for time, its_end in touched.get(node, ()):
                its_end = min(its_end, end)  # noqa: PLW2901 - of the prompt's blocks
                if its_end <= first:
                    continue
                if found.runs and found.runs[-1].time == time and found.runs[-1].end == first:
                    found.runs[-1].end = its_end
                else:
                    found.runs.append(_Run(time, first, its_end))
                first = its_end
            if node in copies:
                found.copied += [(block, earlier) for block, earlier in copies[node].items() if block < end]
            first = end
        return found

    def _place(self, time: int, block: int) -> int:
        """The place of a block that request `time` touched last, in pools without stale copies before it."""
        num_gone = self._ends[time] - self._left[time]
        return self._left.total_after(time) + block - num_gone + 1 + self._num_ahead

    def _sizes(self, time: int, block: int) -> _Sizes:
        """The numbers of blocks of the pools that hold a block that request `time` touched last."""
        changes = [
            (size, -1 if i % 2 else 1)
            for stale_time, sizes in self._stale
            if stale_time > time
            for i, size in enumerate(sizes)
        ]
        place, low = self._place(time, block), 0.0
        sizes: _Sizes = []
        for size, change in [*sorted(changes), (inf, 0)]:
            first = max(low, place)
            if first < size:
                if sizes and sizes[-1] == first:
                    sizes[-1] = size
                else:
                    sizes += [first, size]
            low, place = size, place + change
        return sizes

    def _count_hits(self, runs: Iterable[_Run]) -> None:
        bends = self.bends
        for run in runs:
            if not any(time > run.time for time, _ in self._stale):
                place = self._place(run.time, run.first)
                bends[place] += 1
                bends[place + run.end - run.first] -= 1
                continue
            for block in range(run.first, run.end):
                for i, size in enumerate(self._sizes(run.time, block)):
                    if size != inf:
                        bends[int(size)] += -1 if i % 2 else 1
                        bends[int(size) + 1] -= -1 if i % 2 else 1

    def _remove(self, found: _Found, num_looked_up: int) -> None:
        """Removes the blocks that are touched from their places. Of several copies one is: see rule 5."""
        copied = [(block, earlier) for block, earlier in found.copied if block < num_looked_up]
        stale = [
            (time, self._sizes(before, block))
            for block, earlier in copied
            for before, time in zip(earlier, [*earlier[1:], _time_of(found.runs, block)], strict=True)
        ]
        for block, earlier in copied:
            for time in earlier:
                self._left.add(time, -1)
            for node, end in found.nodes:
                if block < end:
                    del self._copies[node][block]
                    break
        for run in found.runs:
            self._left.add(run.time, run.first - run.end)
        self._stale += stale


def _time_of(runs: Iterable[_Run], block: int) -> int:
    return next(run.time for run in runs if run.first <= block < run.end)


class _Counts:
    """Counts by time, from 1, with their sums: a Fenwick tree that grows."""

    def __init__(self) -> None:
        self._counts = [0]
        self._sums = [0]  # at i: of the times (i - (i & -i), i]
        self._total = 0

    def __getitem__(self, time: int) -> int:
        return self._counts[time]

    def append(self, count: int) -> None:
        """Adds the count of the next time."""
        time = len(self._counts)
        self._counts.append(count)
        self._sums.append(count + sum(self._sums[i] for i in _parts(time - 1, time & (time - 1))))
        self._total += count

    def add(self, time: int, change: int) -> None:
        """Changes the count of a time."""
        self._counts[time] += change
        self._total += change
        while time < len(self._sums):
            self._sums[time] += change
            time += time & -time

    def total_after(self, time: int) -> int:
        """Sum of the counts of all later times. O(log times)."""
        return self._total - sum(self._sums[i] for i in _parts(time, 0))


def _parts(time: int, end: int) -> Iterator[int]:
    """The entries of a Fenwick tree that together cover the times (end, time]."""
    while time > end:
        yield time
        time &= time - 1
