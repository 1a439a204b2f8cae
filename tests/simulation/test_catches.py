"""The simulation finds bugs: each test injects one, and a schedule must find it.

Each bug has seeds of schedules. If none of them finds it after a change of the product, others are tried, which takes
up to a minute, and the test prints the seed to put in their place.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from random import Random
from typing import Any

import pytest

from kvpool.client import reserves, result_reader
from kvpool.client.reserves import hand_over
from kvpool.client.session import SessionBase
from kvpool.client.step_builder import StepBuilder
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.free_list import FreeList
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.host_tier import HostTier, copier
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.blocks.slot_allocator import SlotAllocator
from kvpool.core.blocks.steps_in_flight import StepsInFlight
from kvpool.core.execution import apply, end_session
from kvpool.core.ids import RequestNumber, SessionNumber, StepNumber
from kvpool.core.ranks.membership import Membership
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step
from kvpool.lending.fence import Fence
from kvpool.server import app
from kvpool.server.cluster.messages import acknowledgement
from kvpool.server.cluster.replica import Replica
from kvpool.server.cluster.replication_client import PrimaryStream
from kvpool.server.cluster.standbys import NOTHING, Standbys
from kvpool.server.guard import primary_check
from kvpool.server.journal.journal import Journal
from simulation.run import run_batch
from simulation.world import draw_world

TRIES = 1000
_GIVE_BACK = SlotAllocator.give_back
Patch = tuple[Any, str, Any]
Bug = tuple[tuple[int, ...], *tuple[Patch, ...]]
"""Seeds of schedules that found a bug soonest, and what makes the bug."""


def seeds(*, of_shards: bool) -> Iterator[int]:
    """The seeds of schedules with one server, or with a shard."""
    return (seed for seed in count() if draw_world(Random(seed)).is_shard == of_shards)  # noqa: S311 - a simulation


def check_found(bug: str, known: tuple[int, ...], *, of_shards: bool) -> None:
    """Fails unless a schedule finds something: one of the known seeds, or one of the first `TRIES`."""
    for seed in (*known, *islice(seeds(of_shards=of_shards), TRIES)):
        _, found = run_batch([seed])
        if found:
            print(f"{bug}: seed {seed}: {found[0][1]}")  # noqa: T201 - shown with -s
            return
    pytest.fail(f"{TRIES} schedules did not find that {bug}")


def _no_answer(_self: Session, sequence: int, _source: object) -> None:
    del sequence


def _keeps_hash(self: PrefixMap, block_id: Any) -> Any:
    return self.block_hash(block_id)


def _knows_no_epoch(real: Callable[..., Any]) -> Callable[..., Any]:
    def register(self: Membership, link: Any, registration: Any, now_seconds: float) -> Any:
        return real(self, link, replace(registration, last_epoch=0, held=None), now_seconds)

    return register


def _touches_nothing(_self: BlockPool, block_ids: Any) -> int:
    return len(block_ids) * 0


def _skips_one_more(real: Callable[..., int]) -> Callable[..., int]:
    return lambda self, num_computed: real(self, num_computed) + (not self.spec.keeps_all and num_computed > 0)


def _frees_nothing(pool: KVCacheManager, quarantined: Quarantined) -> None:
    pool.quarantine.remove(quarantined)


def _frees_at_once(pool: KVCacheManager, session: Session, *_: float) -> None:
    end_session.end_session(pool, session)


def _begins_nothing(_self: StepsInFlight, _launched: int, *, has_others: bool) -> None:
    del has_others


def _writes_later(real: Callable[..., None]) -> Callable[..., None]:
    def record(self: Journal, *command: Any) -> None:
        waiting = vars(self).setdefault("waiting", [])
        waiting.append(command)
        if len(waiting) > 1:
            real(self, *waiting.pop(0))

    return record


def _lives(*_: object) -> bool:
    return True


def _reserves_at_any_cost(  # noqa: PLR0913, PLR0917 - as the original
    self: SlotAllocator,
    request: Any,
    hit: Any,
    counts: Any,
    found: Any,
    num_slots: int,
    num_encoder_tokens: int,
    _: Any,
) -> Any:
    wanted = [
        manager.num_missing_blocks(table, min(num_slots, self._max_tokens), num_encoder_tokens) - len(blocks)
        for manager, table, blocks in zip(self._managers, request.tables, hit, strict=True)
    ]
    fits = request.reserve_tokens and sum(max(count, 0) for count in wanted) <= self._blocks.num_available_blocks
    return (wanted, found) if fits else (counts, found)


def _counts_again(real: Callable[..., Any]) -> Callable[..., Any]:
    last: dict[str, Step] = {}  # a repeated one is not decoded

    def apply_step(pool: KVCacheManager, session: Session, step: Step, message: bytes = b"") -> Any:
        is_repeated, step_before = session.sequence == step.sequence, last.get(session.session_id)
        result = real(pool, session, step, message)
        if not is_repeated:
            last[session.session_id] = step
        elif step_before and Operation.RESERVE in step_before.operations:
            for number, num_taken in zip(step_before.request_numbers, step_before.num_taken_tokens, strict=False):
                if request := session.by_number.get(RequestNumber(number)):
                    request.num_computed_tokens += num_taken
        return result

    return apply_step


def _caches_uncertain(self: Any, _: int, row: Any) -> None:
    self._withdraw_pending(row.request)
    if row.has_taken and row.request.reserve_tokens:
        self._pool.cache_blocks(row.request, row.num_computed_tokens, sequence=self._sequence)
    self._pool.free(row.request)
    self._session.forget(row.request)


def _publishes_early(real: Callable[..., Any]) -> Callable[..., Any]:
    def reserve(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **{**options, "sequence": StepNumber(1)})

    return reserve


def _hands_over_twice(request: Any, spans: Any, num_tokens: int) -> Any:
    before = [list(each) for each in request.reserve_ids]
    new = hand_over(request, spans, num_tokens)
    request.reserve_ids = before
    return new


def _gives_back_all(real: Callable[..., None]) -> Callable[..., None]:
    return lambda self, requests, _: real(self, requests, {})


def _publishes_at_once(real: Callable[..., Any]) -> Callable[..., Any]:
    def clean(self: HostTier, num_taken: int, session_number: SessionNumber, sequence: StepNumber) -> Any:
        yield from real(self, num_taken, session_number, sequence)
        self._first.prefix_map.pending.publish(copier(session_number), sequence)

    return clean


def _keeps_copies_of_the_dead(self: KVCacheManager, session_number: SessionNumber) -> None:
    self.blocks.evict_blocks(self.blocks.prefix_map.pending.of(session_number))
    self.blocks.prefix_map.pending.publish(copier(session_number), StepNumber(2**60))


def _loses_one(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: real(self)[1:]


def _takes_twice(real: Callable[..., Any]) -> Callable[..., Any]:
    def take_copies(self: SessionBase) -> Any:
        before, copies = vars(self).get("taken", []), real(self)
        vars(self)["taken"] = copies
        return [*before, *copies]

    return take_copies


BUGS: dict[str, Bug] = {
    "a repeated change is applied again": ((17,), (Session, "remembered_result", _no_answer)),
    "a block is hit by others before it is filled": ((4, 2), (PrefixMap, "is_visible", lambda *_: True)),
    "an allocated block keeps its hash": ((5, 2), (PrefixMap, "remove", _keeps_hash)),
    "a restarted server counts epochs from 1": ((24,), (Membership, "register", _knows_no_epoch(Membership.register))),
    "a hit block stays free": ((4, 5), (BlockPool, "touch", _touches_nothing)),
    "a window is freed one block too early": (
        (5, 8),
        (GroupManager, "num_skipped_blocks", _skips_one_more(GroupManager.num_skipped_blocks)),
    ),
    "blocks released from quarantine stay held": ((63,), (end_session, "end_quarantine", _frees_nothing)),
    "a rank admits the steps of all sessions": ((2,), (Fence, "_is_live", _lives)),
    "a rank answers while a step is in flight": ((2, 145), (Fence, "pending", property(lambda _: ()))),
    "a change is journaled after its answer": ((7,), (Journal, "record", _writes_later(Journal.record))),
    "blocks of an ended session are reallocated at once": (
        (108, 145),
        (end_session, "quarantine_session", _frees_at_once),
    ),
    "blocks are reallocated while a step in flight uses them": ((17,), (StepsInFlight, "begin_frees", _begins_nothing)),
    "blocks that wait for steps count to no maximum": ((231,), (FreeList, "put_own_first", lambda *_: None)),
    "a reserve takes blocks of another session's minimum": (
        (2, 24),
        (SlotAllocator, "_with_reserve", _reserves_at_any_cost),
    ),
    "a repeated report of slots taken counts again": (
        (140, 32),
        (apply, "apply_step", _counts_again(apply.apply_step)),
    ),
    "a free caches what no step is certain to compute": (
        (31, 85),
        (apply, "_HANDLERS", {**apply._HANDLERS, Operation.FREE: _caches_uncertain}),
    ),
    "a reserve is given back with a computed block": (
        (32, 82),
        (SlotAllocator, "give_back", lambda self, *arguments: _GIVE_BACK(self, arguments[0], arguments[1] - 1)),
    ),
    "what was computed in a reserve is hit before it has run": (
        (33, 101),
        (KVCacheManager, "reserve", _publishes_early(KVCacheManager.reserve)),
    ),
    "a block of a reserve is handed over twice": (
        (2, 23),
        (reserves, "hand_over", _hands_over_twice),
        (result_reader, "hand_over", _hands_over_twice),
    ),
    "a session keeps what it gives back": (
        (2, 24),
        (result_reader, "cut", lambda *_: None),
    ),
    "a session gives back slots that the same step takes": (
        (32, 46),
        (StepBuilder, "_give_back", _gives_back_all(StepBuilder._give_back)),
    ),
    "a copy to host memory is hit before it is made": (
        (192, 327),
        (HostTier, "clean", _publishes_at_once(HostTier.clean)),
    ),
    "a block that is copied to host memory is taken by another session": (
        (104, 90),
        (HostTier, "note_taken", lambda *_: None),
    ),
    "a block that is copied from host memory is replaced": ((695,), (HostTier, "read", lambda *_: None)),
    "a copy of a dead engine is hit": ((192, 327), (KVCacheManager, "evict_pending", _keeps_copies_of_the_dead)),
    "a scheduler loses a copy": ((27, 15), (SessionBase, "take_copies", _loses_one(SessionBase.take_copies))),
    "a scheduler makes copies again later": (
        (166, 104),
        (SessionBase, "take_copies", _takes_twice(SessionBase.take_copies)),
    ),
}


def _confirms(*methods: str) -> Patch:
    """Lets the answers of these methods out without a confirmation."""
    return primary_check, "_UNCONFIRMED", primary_check._UNCONFIRMED | {f"kvpool.v1.{method}" for method in methods}


def _keeps_connection(self: PrimaryStream) -> None:
    self.is_left = True


def _acknowledges(real: Callable[[PrimaryStream, bytes], None]) -> Callable[[PrimaryStream, bytes], None]:
    def data_received(self: PrimaryStream, received: bytes) -> None:
        if not self.is_left:
            real(self, received)
        elif self._transport:
            position = vars(self).get("position", self._client.position) + len(self._reader.feed(received))
            vars(self)["position"] = position
            self._transport.write(acknowledgement(position))

    return data_received


def _confirms_always(self: Replica) -> None:
    self.confirmed = self.last_position


def _adds_early(real: Callable[..., None]) -> Callable[..., None]:
    def await_joining(self: Standbys, *arguments: Any) -> None:
        real(self, *arguments)
        for standby in self.connected.values():
            standby.joins_at = None if standby.joins_at is None else NOTHING

    return await_joining


SHARD_BUGS: dict[str, Bug] = {
    "a standby acknowledges after its takeover was sent": (
        (164,),
        (PrimaryStream, "leave", _keeps_connection),
        (PrimaryStream, "data_received", _acknowledges(PrimaryStream.data_received)),
    ),
    "a renewal of a lease is not confirmed": ((134,), _confirms("AllocatorService/KeepAlive")),
    "a step is not confirmed": ((10,), _confirms("AllocatorService/Schedule")),
    "a member is added before it caught up": ((158,), (Standbys, "await_joining", _adds_early(Standbys.await_joining))),
    "epochs of a new primary do not depend on its term": (
        (10, 50),
        (app, "EPOCHS_PER_TERM", 0),
        (Membership, "register", _knows_no_epoch(Membership.register)),
    ),
    "a deposed primary answers until it reads the directory": ((1,), (Replica, "_confirm", _confirms_always)),
}


@pytest.mark.parametrize("bug", [*BUGS, *SHARD_BUGS])
def test_an_injected_bug_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    of_shards = bug in SHARD_BUGS
    known, *patches = (SHARD_BUGS if of_shards else BUGS)[bug]
    for patch in patches:
        monkeypatch.setattr(*patch)
    check_found(bug, known, of_shards=of_shards)
