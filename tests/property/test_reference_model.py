"""One session of the core compared, block id for block id, with a model that recomputes everything at each operation.

The model has only plain lists: the free blocks in order, the contents of each cached block, and the blocks of each
request. It is written from the docstrings of kv_cache_manager, block_pool and free_list, and shares no code with them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.core.ids import RequestNumber
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation, Outcome
from support.core import World

MAX_MODEL_LEN = 256
which_one = st.integers(0, 7)
bits = st.sampled_from([0, 0, 1, 2])
lengths = st.sampled_from([9, 13, 8, 5, 3, 1])
Content = tuple[int, ...]
REFUSED = ([Outcome.NO_BLOCKS], [Outcome.NEVER_FITS])


@dataclass
class NaiveRequest:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: int = 0
    """Number of leading blocks that were cached or hit."""


@dataclass
class NaivePool:
    """A model of a pool whose operations cost O(everything)."""

    num_blocks: int
    block_size: int
    lru: bool
    caching: bool
    eagle: bool

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        self.cached: list[tuple[Content, int]] = []  # in the order of caching
        self.requests: dict[int, NaiveRequest] = {}

    def prefix(self, request: NaiveRequest, i: int) -> Content:
        return tuple(request.tokens[: (i + 1) * self.block_size])

    def hit(self, request: NaiveRequest) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self.block_size < len(request.tokens):
            copies = [block for content, block in self.cached if content == self.prefix(request, len(found))]
            if not copies:
                break
            found.append(copies[0])
        return found[:-1] if self.eagle else found

    def allocate(
        self, request: NaiveRequest, hit: Sequence[int], new: int, lookahead: int, *, delay: bool
    ) -> list[int] | None:
        computed = len(hit) * self.block_size + request.computed + new
        slots = min(computed + lookahead, MAX_MODEL_LEN)
        blocks = request.blocks + list(hit)
        missing = 0
        while (len(blocks) + missing) * self.block_size < slots:
            missing += 1
        left = [block for block in self.free if block not in hit]
        if missing > len(left):
            return None
        taken, self.free = left[:missing], left[missing:]
        self.evict(taken)
        request.blocks = blocks + taken
        request.computed = computed
        request.known += len(hit)
        if not delay:
            self.cache(request, computed)
        return taken

    def cache(self, request: NaiveRequest, num_tokens: int) -> None:
        full = min(num_tokens, len(request.tokens)) // self.block_size
        while self.caching and request.known < full:
            self.cached.append((self.prefix(request, request.known), request.blocks[request.known]))
            request.known += 1

    def release(self, request: NaiveRequest) -> None:
        blocks, request.blocks, request.computed, request.known = request.blocks, [], 0, 0
        held = [block for other in self.requests.values() for block in other.blocks]
        freed = [block for block in reversed(blocks) if block not in held]
        cached = [block for _, block in self.cached]
        to_head = [] if self.lru else [block for block in freed if block not in cached]
        self.free = [*to_head, *self.free, *(block for block in freed if block not in to_head)]

    def evict(self, blocks: Sequence[int]) -> None:
        self.cached = [(content, block) for content, block in self.cached if block not in blocks]


class Comparison(RuleBasedStateMachine):
    """The core and the model, with the same operations."""

    @initialize(
        num_blocks=st.sampled_from([12, 9, 7, 5, 3, 2]),
        block_size=st.integers(1, 4),
        order=st.sampled_from(ReuseOrder),
        caching=st.sampled_from([True, True, True, False]),
        eagle=st.sampled_from([False, False, True]),
    )
    def start(self, *, num_blocks: int, block_size: int, order: ReuseOrder, caching: bool, eagle: bool) -> None:
        self.model = NaivePool(num_blocks, block_size, order is ReuseOrder.LRU, caching, eagle)
        self.world = World(
            num_blocks, block_size=block_size, reuse_order=order, enable_caching=caching, use_eagle=eagle
        )
        self.session = self.world.open()
        self.added = 0

    def hashes(self, request: NaiveRequest, before: int) -> bytes:
        size = self.model.block_size
        blocks = range(before // size, len(request.tokens) // size) if self.model.caching else ()
        return b"".join(hashlib.sha256(repr(self.model.prefix(request, i)).encode()).digest() for i in blocks)

    def pick(self, which: int, *, running: bool) -> tuple[int, NaiveRequest] | None:
        requests = [(n, r) for n, r in self.model.requests.items() if bool(r.blocks) is running]
        return requests[which % len(requests)] if requests else None

    @rule(bits=bits, length=lengths)
    def add(self, bits: int, length: int) -> None:
        self.added += 1
        tokens = [bits >> (i // 4) & 1 for i in range(length)]  # a small alphabet, so that prefixes are shared
        request = self.model.requests[self.added] = NaiveRequest(tokens)
        self.world.run(
            self.session, Operation.APPEND, request_numbers=[self.added], num_appended_tokens=[len(tokens)],
            block_hashes=self.hashes(request, 0), request_ids=[f"r{self.added}"],
        )  # fmt: skip

    @rule(
        which=which_one, max_tokens=st.sampled_from([0, 0, 0, 2, 7]), lookahead=st.integers(0, 5), delay=st.booleans()
    )
    def admit(self, *, which: int, max_tokens: int, lookahead: int, delay: bool) -> None:
        picked = self.pick(which, running=False)
        if not picked:
            return
        number, request = picked
        hit = self.model.hit(request)
        left = len(request.tokens) - len(hit) * self.model.block_size
        new = min(left, max_tokens) if max_tokens else left
        expected = self.model.allocate(request, hit, new, lookahead, delay=delay)
        result = self.world.run(
            self.session, Operation.ADMIT, request_numbers=[number], num_new_tokens=[max_tokens],
            num_lookahead_tokens=[lookahead], delay_cache_blocks=[delay],
        )  # fmt: skip
        if expected is None:
            assert result.outcomes in REFUSED
            assert not result.block_ids
        else:
            assert (result.outcomes, result.block_ids) == ([], hit + expected)
            assert (sum(result.num_prefix_blocks), sum(result.num_new_tokens)) == (len(hit), new)

    @rule(bits=bits, length=lengths)
    def add_and_admit(self, bits: int, length: int) -> None:
        self.add(bits, length)
        self.admit(which=-1, max_tokens=0, lookahead=0, delay=False)

    @rule(which=which_one, grown=st.lists(st.integers(0, 1), max_size=4), new=st.integers(1, 5), delay=st.booleans())
    def decode(self, *, which: int, grown: list[int], new: int, delay: bool) -> None:
        picked = self.pick(which, running=True)
        if not picked:
            return
        number, request = picked
        before = len(request.tokens)
        request.tokens += grown
        expected = self.model.allocate(request, (), new, 0, delay=delay)
        result = self.world.run(
            self.session, Operation.ALLOCATE, request_numbers=[number], num_appended_tokens=[len(grown)],
            num_new_tokens=[new], delay_cache_blocks=[delay], block_hashes=self.hashes(request, before),
        )  # fmt: skip
        if expected is None:
            assert result.outcomes in REFUSED
            assert not result.block_ids
        else:
            assert (result.outcomes, result.block_ids) == ([], expected)

    @rule(which=which_one)
    def cache(self, which: int) -> None:
        picked = self.pick(which, running=True)
        if picked:
            number, request = picked
            self.model.cache(request, request.computed)
            self.world.run(self.session, Operation.CACHE, request_numbers=[number], num_new_tokens=[request.computed])

    @rule(which=which_one, operation=st.sampled_from([Operation.FREE, Operation.PREEMPT]))
    def release(self, which: int, operation: Operation) -> None:
        picked = self.pick(which, running=True)
        if picked:
            number, request = picked
            self.model.release(request)
            if operation is Operation.FREE:
                del self.model.requests[number]
            self.world.run(self.session, operation, request_numbers=[number])

    @rule(block=st.integers(0, 20))
    def evict(self, block: int) -> None:
        block_id = 1 + block % (self.model.num_blocks - 1)
        self.model.evict([block_id])
        self.world.run(self.session, Operation.EVICT, num_block_ids=[1], block_ids=[block_id])

    @rule()
    def reset(self) -> None:
        in_use = any(request.blocks for request in self.model.requests.values())
        if not in_use:
            self.model.cached = []
        assert self.world.run(self.session, Operation.RESET).outcomes == ([Outcome.IN_USE] if in_use else [])

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "world"):
            return
        blocks = self.world.pool.blocks
        assert list(blocks.free_list) == self.model.free
        assert sorted(block_id for _, _, block_id in blocks.prefix_map.entries()) == sorted(
            block for _, block in self.model.cached
        )
        for number, request in self.model.requests.items():
            assert self.session.by_number[RequestNumber(number)].tables[0].block_ids == request.blocks


Comparison.TestCase.settings = settings(
    max_examples=settings().max_examples * 5 // 2, stateful_step_count=40, derandomize=True
)
TestComparison = Comparison.TestCase
