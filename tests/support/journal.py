"""Journals for tests: random changes to record, and a comparison of the complete state of two allocators."""

import asyncio
import contextlib
import hashlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from kvpool.core.blocks.block_contents import BlockContents
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.free_list import Chunk, FreeList
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.pending_blocks import PendingBlocks
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.blocks.slot_allocator import SlotAllocator
from kvpool.core.blocks.state_readers import StateReaders
from kvpool.core.commands import Command
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import BlockId, SessionId
from kvpool.core.sessions.quarantine import Quarantine
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import CrossAttentionSpec
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.core.steps.columns import Operation, Outcome, Step
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.folder import Folder, Writer
from kvpool.server.journal.frames import HEAD_BYTES
from kvpool.server.journal.journal import Journal
from kvpool.server.journal.records import encode_record, execute_record
from kvpool.server.journal.recovery import Recovery, recover
from support.integrity import check_integrity
from support.state import DrivenState, driven

WRITER = Writer("1 Python", "this-boot")
_WHILE_READ = (
    (State, "_is_read"),
    (FreeList, "_copy"),
    (PrefixMap, "_column_copies"),
    (BlockContents, "_copy"),
    (Session, "requests_copy"),
)
NOT_RESTORED: dict[tuple[type, str], str] = {
    (Session, "last_seen_seconds"): "leases restart with each process",
    (Session, "open_streams"): "streams end with the process",
    (Quarantine, "_num_blocks"): "is counted on demand",
    (FreeList, "_chunks"): "skipped entries are left out; the free blocks are compared in order",
    (Chunk, "at"): "the same",
    (Chunk, "block_ids"): "the same",
    (PendingBlocks, "_unpublished"): "follows from the steps; those without blocks are left out",
    **dict.fromkeys(((StateReaders, "_by_request"), (StateReaders, "_steps")), "follows from the requests; see below"),
    **dict.fromkeys(_WHILE_READ, "ends with a snapshot"),
    (State, "new_block_lifetimes"): "each process has its own",
    **dict.fromkeys(((State, "_sample_key"), (KVCacheManager, "_sample_key")), "each process draws its own"),
    (SlotAllocator, "reserve_floor_blocks"): "is set by each step",
    (KVCacheManager, "hit_curve"): "follows from the key",
    (KVCacheManager, "block_lifetimes"): "each process draws its own sample",
    (BlockPool, "block_lifetimes"): "each process draws its own sample",
    (BlockPool, "_num_reserved"): "memory that a process had is not that of another",
    (BlockPool, "_num_spare"): "the same",
    (BlockPool, "_events"): "watchers of a new process begin with a snapshot",
}
"""Fields that may differ in a recovered allocator, with the reason."""


def journal_in(
    folder: Path,
    writer: Writer = WRITER,
    faults: FaultPoints = NO_FAULTS,
    past_epoch: int = 0,
    **settings: Any,
) -> Journal:
    """A journal, before `begin`. It records what its state executes."""
    journal = Journal(JournalConfig(str(folder), **settings), DrivenState, writer, faults, past_epoch)
    driven(journal).journal = journal
    return journal


def begin(journal: Journal, now_seconds: float = 0.0) -> None:
    """Starts recording, as a server does."""
    journal.begin()
    driven(journal).renew_leases(now_seconds)


def recovered(folder: Path, writer: Writer = WRITER, past_epoch: int = 0) -> Recovery:
    """The state that a new process recovers."""
    opened = Folder(folder, writer)
    try:
        return recover(opened, DrivenState, past_epoch)
    finally:
        opened.close()


class Recorder:
    """Keeps the records of a state's commands.

    Attributes:
        error: Empty, as it is always up.
        records: The payloads of the records.
        num_bugs: Number of commands that failed halfway.
    """

    def __init__(self, state: DrivenState | None = None) -> None:
        self.error = ""
        self.records: list[bytes] = []
        self.num_bugs = 0
        if state:
            state.journal = self

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        self.records.append(encode_record(command, now_seconds, result)[HEAD_BYTES:])

    def crash_after_bug(self, _: str) -> None:
        self.num_bugs += 1


def replay(state: State, records: Iterable[bytes]) -> None:
    """Executes the commands of records, each of which leaves no events."""
    for record in records:
        execute_record(state, record)
        assert not any(pool.blocks.take_events() for pool in state.pools)


def kill(journal: Journal) -> None:
    """Unlocks the folder without writing anything, as the death of the process does."""
    if journal._log:
        journal._log.close()
        journal._log = None
    journal._folder.close()


@contextlib.asynccontextmanager
async def running(journal: Journal) -> AsyncIterator[None]:
    """Runs a journal's task. The process dies at the end."""
    task = asyncio.create_task(journal.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        kill(journal)


def begin_and_die(folder: Path) -> Journal:
    """What a process does that begins its journal and dies before its first snapshot is complete."""
    journal = journal_in(folder)
    begin(journal)
    kill(journal)
    return journal


def leave_journal(folder: Path, config: PoolConfig, seed: int, num_changes: int) -> None:
    """Leaves a journal with `num_changes` changes of a `Traffic`, as a killed process does."""
    journal = journal_in(folder)
    begin(journal)
    Traffic(driven(journal), config, seed).changes(num_changes)
    kill(journal)


def states_of(config: PoolConfig, seed: int, num_changes: int) -> list[DrivenState]:
    """States that such a journal may recover: nothing, and the state after each record. A change may have several."""
    state = DrivenState()
    recorder, traffic = Recorder(state), Traffic(state, config, seed)
    traffic.changes(num_changes)
    found = []
    for count in range(len(recorder.records) + 1):
        found.append(DrivenState())
        replay(found[-1], recorder.records[:count])
    return found


def files_of(folder: Path) -> list[Path]:
    """The files of a journal that have content."""
    return [path for path in sorted(folder.iterdir()) if path.name != "lock"]


def assert_recovers(folder: Path, state: State) -> Recovery:
    """A new process recovers this state."""
    found = recovered(folder)
    assert not found.dropped, found.detail
    assert_alike(state, found.state)
    return found


def is_alike(mine: Any, theirs: Any) -> bool:
    """Whether `assert_alike` finds no difference."""
    try:
        assert_alike(mine, theirs)
    except AssertionError:
        return False
    return True


def assert_alike(mine: Any, theirs: Any) -> None:
    """Compares the complete state of two allocators, field by field."""
    _compare(_fields(State, mine), _fields(State, theirs), "allocator", set())
    for pool, other in zip(mine.pools, theirs.pools, strict=True):
        assert list(pool.blocks.free_list) == list(other.blocks.free_list)
        assert pool.state_readers._steps == other.state_readers._steps
        check_integrity(other, list(other.sessions.values()))


def _fields(kind: type, value: Any) -> dict[str, Any]:
    names = {name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())}
    names |= vars(kind()).keys() if kind is State else vars(value).keys() if hasattr(value, "__dict__") else set()
    return {name: getattr(value, name) for name in sorted(names) if (kind, name) not in NOT_RESTORED}


def _compare(mine: Any, theirs: Any, where: str, seen: set[int]) -> None:
    assert type(mine) is type(theirs) or isinstance(mine, Outcome), where  # columns are of ints
    if id(mine) in seen:
        return
    if isinstance(mine, dict):
        assert len(mine) == len(theirs), where
        if not any(
            name in where for name in ("_by_hash", "_num_copies", "PendingBlocks['steps']")
        ):  # compared by key only
            assert list(mine) == list(theirs), where
        for key in mine:
            _compare(mine[key], theirs[key], f"{where}[{key!r}]", seen)
    elif isinstance(mine, list | tuple | deque):
        assert len(mine) == len(theirs), where
        if set(map(type, mine)) <= {int, bytes, type(None)}:
            assert mine == theirs, where
            return
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            _compare(one, other, f"{where}[{i}]", seen)
    elif type(mine).__module__.startswith("kvpool.core") and not isinstance(mine, Enum):
        seen.add(id(mine))
        kind = type(mine)
        assert not isinstance(mine, FunctionType | MethodType)
        _compare(_fields(kind, mine), _fields(kind, theirs), f"{where}.{kind.__name__}", seen)
    else:
        assert mine == theirs, where


class Traffic:
    """Random changes of one pool by sessions that are opened and closed, determined by a seed.

    The sessions belong to three tenants. Equal tokens have equal hashes, and each tenant has a namespace; with
    `salts_hashes`, each tenant has other hashes and there is one namespace.

    Attributes:
        allocator: What is changed; may be replaced by one that is alike.
        now_seconds: The time.
    """

    def __init__(self, allocator: DrivenState, config: PoolConfig, seed: int, *, salts_hashes: bool = False) -> None:
        self.allocator = allocator
        self._salts_hashes = salts_hashes
        self._salts: dict[SessionId, bytes] = {}
        self.now_seconds = 100.0
        self._config = config
        self._random = random.Random(seed)  # noqa: S311 - a workload
        self._opened = 0
        self._requests = 0
        self._tokens: dict[tuple[str, int], list[int]] = {}
        allocator.create_pool(config, b"n" * 32)

    def changes(self, count: int) -> None:
        for _ in range(count):
            self.change()

    def change(self) -> object:
        """Makes one change; returns its result, or the reason of its refusal."""
        self.now_seconds += 0.25
        released = [each.session.session_number for _, each in self.allocator.end_due_quarantines(self.now_seconds)]
        if released:
            return released
        choice = self._random.random()
        sessions = [session for _, session in self.allocator.sessions]
        if not sessions or (len(sessions) < 3 and choice < 0.1):
            return self._try(self._open)
        session = self._random.choice(sessions)
        if choice > 0.89:
            return self._try(lambda: self._other_than_step(session, choice))
        session.last_seen_seconds = self.now_seconds
        step = self._step(session)
        if choice > 0.85:
            step = replace(step, sequence=session.sequence)  # already used for another step
        answer = self._try(lambda: self.allocator.apply(self.allocator.pools.get("m"), session, step))
        if choice > 0.8 and not isinstance(answer, str):
            assert self.allocator.apply(self.allocator.pools.get("m"), session, step) == answer
        return answer

    def _other_than_step(self, session: Session, choice: float) -> object:
        pool = self.allocator.pools.get("m")
        if choice > 0.98:
            return self.allocator.expire_session(session.session_id, self.now_seconds, 4.0)[2]
        if choice > 0.96:
            return self.allocator.close_session(session.session_id, self.now_seconds)[1]
        if choice > 0.94:
            return self._evict(session)
        if choice > 0.93:
            return self.allocator.reset_prefix_cache(pool)
        if choice > 0.92:
            return self.allocator.set_weights_version(session, self._random.choice(["", "1", "2"]))
        self.allocator.mark_executed(pool, session, self._random.randint(0, session.sequence))
        return None

    def _evict(self, session: Session) -> SessionId:
        return self.allocator.evict_session("m", session.session_number, self.now_seconds, quarantine_seconds=3.0)[
            1
        ].session_id

    def _open(self) -> int:
        self._opened += 1
        name = SessionId(f"session-{self._opened}")
        salt = self._salts[name] = b"s" * (self._opened % 3)
        key = f"key-{self._random.randint(1, 4)}"  # sometimes a key that opened a session before
        opened = self.allocator.open_session(
            "m",
            "client",
            10.0,
            session_id=name,
            now_seconds=self.now_seconds,
            open_key=key,
            memory_id="other" if self._opened % 7 == 0 else "one",
            namespace=b"" if self._salts_hashes else salt,
            reserve_tokens=self._opened % 3 * 4,
        )
        return opened[1].session_number

    def _try(self, change: Callable[[], object]) -> object:
        try:
            return change()
        except KvpoolError as error:
            return error.reason

    def _step(self, session: Session) -> Step:
        step = Step(session.sequence + 1, executed_sequence=self._random.randint(0, session.sequence))
        step.admission_budget_tokens = self._random.choice([0, 0, 20])
        named: set[int] = set()
        for _ in range(self._random.randint(1, 4)):
            there = sorted(set(session.by_number) - named)
            if not there or self._random.random() < 0.35:
                self._requests += 1
                number = self._requests
                step.request_ids.append(f"r{number}")
                self._put(step, session, Operation.ADMIT, number, self._random.randint(1, 40))
            else:
                number = self._random.choice(there)
                request = session.by_number[number]
                running = request.num_computed_tokens > 0
                if self._random.random() < 0.3:
                    self._put(step, session, self._random.choice([Operation.FREE, Operation.PREEMPT]), number, 0)
                elif running:
                    reports = session.reserve_tokens and self._random.random() < 0.4
                    operation = Operation.RESERVE if reports else Operation.ALLOCATE
                    self._put(step, session, operation, number, self._random.randint(0, 9))
                else:
                    self._put(step, session, Operation.ADMIT, number, 0)
            named.add(number)
        if self._random.random() < 0.1:
            self._put(step, session, Operation.EVICT, 0, 0)
            step.block_ids = [BlockId(self._random.randrange(1, self._config.num_blocks))]
            step.num_block_ids = [0] * ((len(step.operations) - 1) * len(self._config.groups))
            step.num_block_ids += [1] + [0] * (len(self._config.groups) - 1)
        return step

    def _put(self, step: Step, session: Session, operation: Operation, number: int, grown: int) -> None:
        tokens = self._tokens.setdefault((session.session_id, number), [])
        request = session.by_number.get(number)  # type: ignore[call-overload]
        del tokens[request.num_tokens if request else 0 :]
        grown = min(grown, self._config.max_model_len - len(tokens) - 2)
        before = len(tokens)
        story = self._random.choice([0, 0, 1])
        tokens += [(story * 100 + i) % 250 for i in range(before, before + grown)]
        step.operations.append(int(operation))
        step.request_numbers.append(number)
        step.declares.append(number != 0 and request is None)
        step.num_appended_tokens.append(grown)
        step.num_new_tokens.append(self._random.randint(1, 9) if operation is Operation.ALLOCATE else 0)
        step.num_lookahead_tokens.append(self._random.choice([0, 9]) if operation is Operation.RESERVE else 0)
        encoder = 8 if any(isinstance(group.spec, CrossAttentionSpec) for group in self._config.groups) else 0
        step.num_encoder_tokens.append(encoder if operation is Operation.ADMIT else 0)
        if self._config.makes_events:
            step.token_ids += tokens[before:]
        if self._config.enable_caching:
            size = self._config.hash_block_size
            salt = self._salts[session.session_id] if self._salts_hashes else b""
            for end in range((before // size + 1) * size, len(tokens) + 1, size):
                step.block_hashes += hashlib.sha256(salt + bytes(tokens[:end])).digest()
