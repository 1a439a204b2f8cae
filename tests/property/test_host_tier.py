"""Engines over two tiers, each with several steps in flight: every step reads what it was given blocks for.

The memory is modelled: each full block holds a content, which copies move and computations write, in the order in which
each engine runs its steps. An engine that dies makes some of its copies, and half of one.

In a pool with events, a router that follows them knows after each change which hashes each tier has.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.prefix_index import PrefixIndex
from kvpool.client.transports.transport import EventBatch, WatchKind
from kvpool.core.blocks.block_contents import BlockContents
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.host_tier import HostTier, copier
from kvpool.core.blocks.integrity import IntegrityError
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import Quota
from kvpool.core.events import BlockEvent, BlockRemoved, BlockStored, Medium
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, GroupId, RequestNumber, SessionNumber, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.state import State
from kvpool.core.steps.columns import Operation, StepResult
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from support.core import BLOCK_SIZE, World, block_hashes
from support.integrity import check_integrity
from support.journal import assert_alike

FULL = FullAttentionSpec(BLOCK_SIZE)
KINDS: Final = (
    (FULL,),
    (FULL, SlidingWindowSpec(BLOCK_SIZE, sliding_window=6)),
    (FULL, MambaSpec(BLOCK_SIZE, only_step_ends=True)),
)
MAX_IN_FLIGHT: Final = 3
NUM_ACTIONS: Final = 150
HALF: Final = b"half of a copy"


@dataclass
class Work:
    """A step that was launched.

    Attributes:
        sequence: Its number.
        copies: Its copies, which run first.
        reads: The contents that blocks must have then.
        writes: The contents that it writes.
    """

    sequence: int
    copies: list[tuple[BlockId, BlockId]]
    reads: list[tuple[BlockId, bytes]]
    writes: list[tuple[BlockId, bytes]]


@dataclass(eq=False)
class Engine:
    """A session, the steps that it has launched and not run, and the newest that has run."""

    session: Session
    in_flight: deque[Work] = field(default_factory=deque)
    launched: int = 0
    executed: int = 0
    num_requests: int = 0


class Followers:
    """Two routers of a pool: one that has every event, and one that always reads another snapshot."""

    def __init__(self, pool: KVCacheManager) -> None:
        self._pool = pool
        self._index = PrefixIndex()
        self._num_copies = Counter[tuple[Medium, GroupId, BlockHash]]()
        self._described: set[tuple[BlockHash, BlockHash | None, bytes]] = set()
        self._late, self._cursor = PrefixIndex(), SnapshotCursor(pool)

    def follow(self) -> None:
        """Applies the events of a change, and one more part of the snapshot; checks what the routers know then."""
        events = self._pool.blocks.take_events()
        for event in events:
            self._check(event)
        for index in (self._index, self._late):
            index.apply(EventBatch(0, tuple(events)))
        self._check_index(self._index)
        self._late.apply(EventBatch(0, tuple(self._cursor.next_chunk(3)), WatchKind.SNAPSHOT))
        if self._cursor.is_done:
            self._check_index(self._late)
            self._late, self._cursor = PrefixIndex(), SnapshotCursor(self._pool)

    def _check(self, event: BlockEvent) -> None:
        match event:
            case BlockStored():
                parents = (event.parent_block_hash, *event.block_hashes)
                for i, block_hash in enumerate(event.block_hashes):
                    self._num_copies[event.medium, event.group_id, block_hash] += 1
                    tokens = event.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
                    assert len(tokens) == BLOCK_SIZE == event.block_size
                    description = block_hash, parents[i], tokens.tobytes()
                    if event.medium is Medium.FIRST_TIER:
                        self._described.add(description)
                    assert description in self._described
            case BlockRemoved():
                key = event.medium, event.group_id, event.block_hash
                self._num_copies[key] -= 1
                assert self._num_copies[key] == event.copies_left
            case _:
                self._num_copies.clear()

    def _check_index(self, index: PrefixIndex) -> None:
        prefix_map, first_host_id = self._pool.blocks.prefix_map, self._pool.blocks.num_blocks
        tiers: dict[Medium, set[tuple[GroupId, BlockHash]]] = {medium: set() for medium in Medium}
        for group_id, block_hash, block_id in prefix_map.entries():
            medium = Medium.HOST_MEMORY if block_id >= first_host_id else Medium.FIRST_TIER
            if medium is Medium.FIRST_TIER or block_id not in prefix_map.pending.steps:
                tiers[medium].add((group_id, block_hash))
        assert {medium: index.entries(medium) for medium in Medium} == tiers
        assert index.entries() == set().union(*tiers.values())


class Engines:
    """What the engines of a pool do, drawn from a seed."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.random = Random(seed)  # noqa: S311 - a simulation
        specs, num_host_blocks = self.random.choice(KINDS), self.random.choice((5, 20, 60))
        num_blocks = self.random.choice((14, 22, 40)) * len(specs)
        self.world = World(num_blocks, specs=specs, num_host_blocks=num_host_blocks, **options)
        self.followers = Followers(self.world.pool) if self.world.pool.config.makes_events else None
        self.contents: dict[BlockId, bytes] = {}
        self.engines = [Engine(self.world.open()) for _ in range(self.random.choice((1, 2, 3)))]
        self.dying: list[Engine] = []
        actions: dict[Callable[[], None], int] = {
            self.admit: 30,
            self.decode: 20,
            self.leave: 20,
            self.run_step: 40,
            self.report: 10,
            self.run_dying: 3,
            self.end_quarantine: 2,
            self.vanish: 1,
            self.close: 1,
            self.evict: 1,
            self.reset: 1,
            self.restore: 1,
            self.change_weights: 1,
        }
        self._actions, self._weights = list(actions), list(actions.values())

    @property
    def host(self) -> HostTier:
        assert self.world.pool.blocks.host
        return self.world.pool.blocks.host

    def act(self) -> None:
        """Does one thing, and checks the pool."""
        (action,) = self.random.choices(self._actions, self._weights)
        action()
        if len(self.engines) < 2:
            quota = Quota(*self.random.choice(((0, 0), (0, 0), (3, 0), (2, 9))))
            namespace = self.random.choice((b"", b"", b"other"))
            if quota.min_blocks <= self.world.pool.quotas.num_left:
                self.engines.append(Engine(self.world.open(quota=quota, namespace=namespace)))
        check_integrity(self.world.pool, self.world.sessions())
        if self.followers:
            self.followers.follow()

    def _step(self, engine: Engine, *operations: Operation, **columns: Any) -> StepResult:
        session = engine.session
        starts = {number: request.num_computed_tokens for number, request in session.by_number.items()}
        reported = {"executed": engine.executed, "launched_sequence": engine.launched}
        if self.followers:  # each token is its place
            columns["token_ids"] = self._token_ids(session, **columns)
        result = self.world.run(session, *operations, **reported, **columns)
        ids = result.copied_block_ids
        copies = [(BlockId(s), BlockId(t)) for s, t in zip(ids[1::3], ids[2::3], strict=True)]
        if Operation.ADMIT not in operations and Operation.ALLOCATE not in operations:
            assert not copies, "a step that may not be launched makes copies"
            return result
        engine.launched = result.sequence
        work = Work(result.sequence, copies, [], [])
        for number in columns["request_numbers"]:
            request = session.by_number[number]
            if not result.outcomes:
                start = starts.get(request.number, 0) or sum(result.num_hit_tokens)
                self._add_contents(work, request, start)
        engine.in_flight.append(work)
        return result

    @staticmethod
    def _token_ids(
        session: Session, request_numbers: Sequence[int] = (), num_appended_tokens: Sequence[int] = (), **_: Any
    ) -> list[int]:
        counts = zip(request_numbers, num_appended_tokens, strict=False)
        known = [(session.by_number.get(RequestNumber(number)), count) for number, count in counts]
        starts = [(request.num_tokens if request else 0, count) for request, count in known]
        return [i for start, count in starts for i in range(start, start + count)]

    def _add_contents(self, work: Work, request: Request, start: int) -> None:
        """Adds what a step over the tokens from `start` on reads and writes of full blocks."""
        for spec, table in zip(self._specs, request.tables, strict=True):
            for i, block_id in enumerate(table.block_ids[: request.num_computed_tokens // BLOCK_SIZE]):
                is_read = (i + 1) * BLOCK_SIZE <= start
                is_kept = (
                    is_read or not isinstance(spec, MambaSpec) or (i + 1) * BLOCK_SIZE == request.num_computed_tokens
                )
                if block_id == NULL_BLOCK or not is_kept:
                    continue
                (work.reads if is_read else work.writes).append((block_id, self._content(request, i)))

    @property
    def _specs(self) -> list[object]:
        return [group.spec for group in self.world.pool.config.groups]

    def _content(self, request: Request, i: int) -> bytes:
        session = self.world.pool.sessions[request.session_number]
        return request.hashes[i] + repr(session.scope).encode() if request.first_map else request.hashes[i]

    def _run(self, work: Work) -> None:
        for source, target in work.copies:
            self.contents[target] = self.contents.get(source, b"")
        for block_id, content in work.reads:
            assert self.contents.get(block_id) == content, f"block {block_id} does not hold what it was given for"
        self.contents.update(work.writes)

    def _one(self, engines: list[Engine]) -> Engine | None:
        return self.random.choice(engines) if engines else None

    def _able(self) -> Engine | None:
        return self._one([each for each in self.engines if len(each.in_flight) < MAX_IN_FLIGHT])

    def admit(self) -> None:
        if not (engine := self._able()):
            return
        engine.num_requests += 1
        content, count = chr(0x100 + self.random.randrange(8)) * 8, self.random.randrange(4, 29)
        numbers, new = [engine.num_requests], count - self.random.choice((0, 0, count % BLOCK_SIZE))
        result = self._step(
            engine,
            Operation.ADMIT,
            request_numbers=numbers,
            num_appended_tokens=[count],
            num_new_tokens=[max(new, 1)],
            request_ids=[f"r{engine.num_requests}"],
            block_hashes=block_hashes(content, count // BLOCK_SIZE),
        )
        if result.outcomes:
            self._step(engine, Operation.FREE, request_numbers=numbers)

    def decode(self) -> None:
        if not (engine := self._able()):
            return
        numbers = [n for n, r in engine.session.by_number.items() if r.holds_blocks and r.num_tokens < 40]
        if not numbers:
            return
        request, count = engine.session.by_number[self.random.choice(numbers)], self.random.randrange(1, 6)
        before, name = request.num_tokens, f"{engine.session.session_number}.{request.number}"
        self._step(
            engine,
            Operation.ALLOCATE,
            request_numbers=[request.number],
            num_appended_tokens=[count],
            num_new_tokens=[count + before - request.num_computed_tokens],
            block_hashes=block_hashes(name * 9, (before + count) // BLOCK_SIZE)[before // BLOCK_SIZE * 32 :],
        )

    def leave(self) -> None:
        engine = self._one([each for each in self.engines if each.session.requests])
        if engine:
            number: RequestNumber = self.random.choice(list(engine.session.by_number))
            if self.random.random() < 0.3:
                self._step(engine, Operation.PREEMPT, request_numbers=[number])
            self._step(engine, Operation.FREE, request_numbers=[number])

    def run_step(self) -> None:
        if engine := self._one([each for each in self.engines if each.in_flight]):
            work = engine.in_flight.popleft()
            self._run(work)
            engine.executed = work.sequence

    def report(self) -> None:
        if engine := self._one(self.engines):
            self.world.allocator.mark_executed(self.world.pool, engine.session, engine.executed)

    def run_dying(self) -> None:
        if engine := self._one([each for each in self.dying if each.in_flight]):
            work = engine.in_flight.popleft()
            num_made = self.random.randrange(len(work.copies) + 1)
            self.contents.update((target, self.contents.get(source, b"")) for source, target in work.copies[:num_made])
            self.contents.update((target, HALF) for _, target in work.copies[num_made : num_made + 1])
            self.contents.update((block_id, HALF) for block_id, _ in work.writes)

    def vanish(self) -> None:
        if engine := self._one(self.engines):
            self.engines.remove(engine)
            self.dying.append(engine)
            self.world.allocator.evict_session("m", engine.session.session_number, 0.0, quarantine_seconds=1.0)

    def end_quarantine(self) -> None:
        if self.dying:
            self.world.allocator.end_quarantine("m", [self.dying.pop(0).session.session_number])

    def close(self) -> None:
        if engine := self._one(self.engines):
            for work in engine.in_flight:
                self._run(work)
            self.engines.remove(engine)
            self.world.allocator.close_session(engine.session.session_id, 0.0)

    def evict(self) -> None:
        if engine := self._one(self.engines):
            block_ids = self.random.sample(range(1, self.world.pool.config.num_ids), 3)
            num_groups = len(self.world.pool.config.groups)
            counts = [3] + [0] * (num_groups - 1)
            self._step(engine, Operation.EVICT, num_block_ids=counts, block_ids=block_ids)

    def reset(self) -> None:
        self.world.allocator.reset_prefix_cache(self.world.pool)

    def change_weights(self) -> None:
        if engine := self._one([each for each in self.engines if not each.session.requests]):
            self.world.allocator.set_weights_version(engine.session, self.random.choice(("", "1", "2")))

    def restore(self) -> None:
        with self.world.allocator.snapshot() as snapshot:
            made = State()
            made.restore(snapshot)
        if not any(each.session.holding for each in self.engines):  # otherwise restored in another order
            assert_alike(self.world.allocator, made)
            lists = [each.blocks.free_list for state in (self.world.allocator, made) for each in state.pools]
            assert lists[0].next_used(8) == lists[1].next_used(8)


def drive(seed: int, **options: Any) -> HostTier:
    engines = Engines(seed, **options)
    for _ in range(NUM_ACTIONS):
        engines.act()
    return engines.host


@given(st.integers(0, 2**32), st.booleans())
def test_every_step_reads_what_it_was_given_blocks_for(seed: int, makes_events: bool) -> None:  # noqa: FBT001 - drawn
    drive(seed, enable_events=makes_events)


def publish_at_once(patch: pytest.MonkeyPatch) -> None:
    clean = HostTier.clean

    def published(self: HostTier, num_taken: int, session_number: SessionNumber, sequence: StepNumber) -> Any:
        yield from clean(self, num_taken, session_number, sequence)
        self._first.prefix_map.pending.publish(copier(session_number), sequence)

    patch.setattr(HostTier, "clean", published)


def reuse_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "note_taken", lambda *_: None)


def lose_orders(patch: pytest.MonkeyPatch) -> None:
    promote = GroupManager.promote

    def lost(self: GroupManager, request: Request, num_hit: int, sequence: StepNumber) -> list[BlockId]:
        targets, copies = promote(self, request, num_hit, sequence), request.copies
        copies[:] = [replace(each, source=each.target) if each.target in targets[:1] else each for each in copies]
        return targets

    patch.setattr(GroupManager, "promote", lost)


def make_copies_twice(patch: pytest.MonkeyPatch) -> None:
    run, made = Engines._run, deque[list[tuple[BlockId, BlockId]]](maxlen=4)

    def twice(self: Engines, work: Work) -> None:
        run(self, replace(work, copies=[*(made[0] if made else ()), *work.copies]))
        made.append(work.copies)

    patch.setattr(Engines, "_run", twice)


def replace_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "read", lambda *_: None)


def keep_copies_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    def evicted(self: KVCacheManager, session_number: SessionNumber) -> None:
        self.blocks.evict_blocks(self.blocks.prefix_map.pending.of(session_number))
        self.blocks.prefix_map.pending.publish(copier(session_number), StepNumber(2**60))

    patch.setattr(KVCacheManager, "evict_pending", evicted)


PLANTED: Final = (
    (publish_at_once, 88),
    (reuse_sources, 31),
    (lose_orders, 0),
    (make_copies_twice, 0),
    (replace_sources, 223),
    (keep_copies_of_the_dead, 208),
)
"""Each with a seed that finds it."""


def name_unpublished_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockContents, "get", lambda self, block_id: self._contents[block_id])


def forget_promotions(patch: pytest.MonkeyPatch) -> None:
    promote = HostTier.promote

    def silent(self: HostTier, *order: Any) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(BlockPool, "record_copied", lambda *_: None)
            promote(self, *order)

    patch.setattr(HostTier, "promote", silent)


def keep_contents_of_the_source_only(patch: pytest.MonkeyPatch) -> None:
    publish = BlockContents.announce
    sources: dict[BlockId, BlockId] = {}

    def announced(self: BlockContents, block_ids: Iterable[BlockId]) -> list[BlockStored]:
        for block_id in (block_ids := list(block_ids)):
            self._contents[block_id] = self._contents[sources[block_id]]
        return publish(self, block_ids)

    patch.setattr(BlockContents, "copy", lambda _, source, target: sources.update({target: source}))
    patch.setattr(BlockContents, "announce", announced)


def count_copies_of_both_tiers(patch: pytest.MonkeyPatch) -> None:
    drop = BlockContents.drop

    def dropped(self: BlockContents, block_id: BlockId) -> list[BlockRemoved]:
        return [
            replace(each, copies_left=sum(of[each.group_id].get(each.block_hash, 0) for of in self._num_copies))
            for each in drop(self, block_id)
        ]

    patch.setattr(BlockContents, "drop", dropped)


PLANTED_IN_EVENTS: Final = (
    (name_unpublished_copies, 0),
    (forget_promotions, 0),
    (keep_contents_of_the_source_only, 0),
    (count_copies_of_both_tiers, 0),
)
"""Each with a seed that finds it."""


@pytest.mark.parametrize(("plant", "seed"), PLANTED)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        drive(seed)


@pytest.mark.parametrize(("plant", "seed"), PLANTED_IN_EVENTS)
def test_a_bug_that_is_planted_in_the_events_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(seed, enable_events=True)
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        drive(seed, enable_events=True)
