"""Drives the core without a transport: one pool, its sessions, and a snapshot of the visible state."""

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvpool.core import ids
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import BlockHash, BlockId, PoolName, RequestId, RequestNumber, SessionId, SessionNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from kvpool.core.steps.allocation_options import AllocationOptions
from kvpool.core.steps.columns import Operation, Step, StepResult
from kvpool.v1.pool_pb2 import PoolInfo
from kvpool.wire.picture import pool_info
from support.refusals import Caught, Kind, refused
from support.state import DrivenState

BLOCK_SIZE = 4
STEP = ids.StepNumber(1)


def config(
    num_blocks: int = 20, block_size: int = BLOCK_SIZE, specs: Sequence[KVCacheSpec] = (), **options: Any
) -> PoolConfig:
    """Returns a small pool configuration with one group per spec; by default one group of full attention.

    The pool can have too few blocks for a request of maximum length, unless `options` say otherwise.
    """
    specs = specs or [FullAttentionSpec(block_size)]
    groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs))
    return PoolConfig(PoolName("m"), num_blocks, 256, groups, **{"allow_too_few_blocks": True, **options})


def block_hashes(content: str, count: int) -> bytes:
    """Returns the joined hashes of the first `count` blocks of a request with tokens named by `content`.

    Contents with the same first letters share the hashes of that many blocks.
    """
    return b"".join(hashlib.sha256(content[: i + 1].ljust(i + 1, "-").encode()).digest() for i in range(count))


def request_of(pool: KVCacheManager, content: str, num_tokens: int) -> Request:
    """Returns a request without a session, whose hash blocks hold `content`."""
    request = Request(RequestId("r"), RequestNumber(1), SessionNumber(1), pool.new_tables(), num_tokens)
    joined = block_hashes(content, pool.config.num_hashes(num_tokens)) if pool.config.enable_caching else b""
    request.hashes = [BlockHash(joined[i : i + 32]) for i in range(0, len(joined), 32)]
    request.token_ids = list(range(num_tokens))
    return request


def admit(pool: KVCacheManager, content: str, num_tokens: int) -> Request:
    """Admits a request for `content`: looks it up and allocates slots for all tokens."""
    request = request_of(pool, content, num_tokens)
    assert pool.admit(request, num_tokens, sequence=STEP)
    return request


def num_allocated(pool_config: PoolConfig) -> int:
    """How many tokens of a request get slots, one by one, with the maximum of tokens in flight."""
    pool = KVCacheManager(pool_config)
    request = request_of(pool, "", pool_config.max_model_len)
    for count in range(pool_config.max_model_len):
        in_flight = min(count, (pool_config.max_in_flight_tokens or 1) - 1)
        options = AllocationOptions(num_in_flight_tokens=in_flight)
        if pool.allocate_slots(request, 1, options=options, sequence=STEP) is None:
            return count
    return pool_config.max_model_len


class World:
    """One pool and its sessions."""

    def __init__(self, num_blocks: int = 20, allocator: DrivenState | None = None, **options: Any) -> None:
        self.allocator = allocator or DrivenState()
        self.pool: KVCacheManager = self.allocator.create_pool(config(num_blocks, **options), b"n" * 32)[0]
        self.now_seconds = 0.0
        self._opened = 0

    def open(self, lease_seconds: float = 10.0, *, pool: str = "m", client_name: str = "", **options: Any) -> Session:
        """Opens a session with another id; for options see `commands.OpenSession`."""
        self._opened += 1
        options = {"session_id": SessionId(f"s{self._opened}"), "now_seconds": self.now_seconds, **options}
        return self.allocator.open_session(pool, client_name, lease_seconds, **options)[1]

    def apply(self, session: Session, step: Step) -> StepResult:
        return self.allocator.apply(self.pool, session, step)

    def run(self, session: Session, *operations: Operation, executed: int = 0, **columns: Any) -> StepResult:
        """Applies a step with the next step number. With `request_ids`, it declares the requests with new numbers."""
        if "request_ids" in columns and "declares" not in columns:
            numbers = columns.get("request_numbers", ())
            columns["declares"] = [number != 0 and number not in session.by_number for number in numbers]
        step = Step(
            session.sequence + 1, executed_sequence=executed, operations=[int(op) for op in operations], **columns
        )
        return self.apply(session, step)

    def declare(
        self, session: Session, operation: Operation, number: int, content: str, num_tokens: int, **columns: Any
    ) -> StepResult:
        """Applies an operation that declares a request whose blocks hold `content`."""
        caches = self.pool.config.enable_caching
        hashes = block_hashes(content, num_tokens // BLOCK_SIZE) if caches else b""
        declared = {"request_numbers": [number], "num_appended_tokens": [num_tokens], "request_ids": [f"r{number}"]}
        return self.run(session, operation, **{**declared, "block_hashes": hashes, **columns})

    def declare_all(
        self,
        session: Session,
        operations: Sequence[Operation],
        contents: Sequence[str],
        num_tokens: int,
        **columns: Any,
    ) -> StepResult:
        """Applies operations of which each declares a request, with numbers from `first` on."""
        first, hashes = columns.pop("first", 1), (block_hashes(each, num_tokens // BLOCK_SIZE) for each in contents)
        numbers = range(first, first + len(operations))
        declared = {"request_numbers": numbers, "num_appended_tokens": [num_tokens] * len(numbers)}
        named = {"block_hashes": b"".join(hashes), "request_ids": [f"r{number}" for number in numbers]}
        return self.run(session, *operations, **{**declared, **named, **columns})

    def admit(self, session: Session, number: int, content: str, num_tokens: int, **columns: Any) -> StepResult:
        """Declares and admits a request."""
        return self.declare(session, Operation.ADMIT, number, content, num_tokens, **columns)

    def allocate(
        self, session: Session, number: int, num_new_tokens: int, *, hit: Sequence[Sequence[int]] = (), **columns: Any
    ) -> StepResult:
        """Allocates slots for new tokens of a request, after a hit with these blocks of each group."""
        if hit:
            columns["num_block_ids"] = [len(block_ids) for block_ids in hit]
            columns["block_ids"] = [block_id for block_ids in hit for block_id in block_ids]
        new = [num_new_tokens]
        return self.run(session, Operation.ALLOCATE, request_numbers=[number], num_new_tokens=new, **columns)

    def decode(self, session: Session, number: int, content: str, num_tokens: int = 1, **columns: Any) -> StepResult:
        """Appends tokens to a request and allocates their slots; its blocks hold `content` then."""
        before = session.by_number[RequestNumber(number)].num_tokens
        config = self.pool.config
        first, end = (
            config.num_hashes(count) if config.enable_caching else 0 for count in (before, before + num_tokens)
        )
        hashes = block_hashes(content, end)[32 * first :]
        appended = [num_tokens]
        return self.allocate(session, number, num_tokens, num_appended_tokens=appended, block_hashes=hashes, **columns)

    def num_found(self, session: Session, content: str, number: int = 99, **columns: Any) -> int:
        """Length of the hit of a request with one token more than `content`, in tokens; in two steps, uncounted."""
        num_tokens = BLOCK_SIZE * len(content) + 1
        found = self.declare(session, Operation.LOOKUP_UNCOUNTED, number, content, num_tokens, **columns)
        self.free(session, number)
        return sum(found.num_hit_tokens)

    def executed(self, session: Session, sequence: int | None = None) -> None:
        """Reports steps up to a number as executed; by default all."""
        self.allocator.mark_executed(self.pool, session, session.sequence if sequence is None else sequence)

    def refuses(self, kind: Kind = InvalidArgumentError, **error: str | None) -> AbstractContextManager[Caught]:
        """Expects an error that changes nothing; see `refused`."""
        return refused(kind, state=self.snapshot, **error)

    def free(self, session: Session, number: int, **columns: Any) -> StepResult:
        return self.run(session, Operation.FREE, request_numbers=[number], **columns)

    def sessions(self) -> list[Session]:
        return list(self.pool.sessions.values())

    def info(self, event_sequence: int = 0) -> PoolInfo:
        """Describes the pool."""
        return pool_info(self.pool, self.allocator.pools.state_of(self.pool), event_sequence)

    def snapshot(self) -> object:
        return snapshot(self.pool, self.sessions())


def opened(num_blocks: int = 20, **options: Any) -> tuple[World, Session]:
    """Returns a world and a session in it."""
    world = World(num_blocks, **options)
    return world, world.open()


def snapshot(pool: KVCacheManager, sessions: list[Session]) -> object:
    """Returns the visible state of a pool and its sessions, for comparisons."""
    blocks = pool.blocks
    ids = [BlockId(i) for i in range(pool.config.num_ids)]
    return (
        list(blocks.free_list),
        [blocks.ref_cnt(b) for b in ids],
        [blocks.block_hash(b) for b in ids],
        dict(blocks.prefix_map.pending.steps),
        repr(pool.stats),
        pool.recent_hit_rate.rate,
        (pool.quotas.min_blocks, pool.quotas.num_left, dict(pool.quotas.num_covering)),
        (blocks.num_evicted, pool.num_preemptions, repr(pool.activity), repr(blocks.group_counters)),
        [
            (
                s.session_id,
                s.sequence,
                s.executed_sequence,
                s.launched_sequence,
                s.owes_reserve,
                repr(s.holding),
                [repr(request) for request in s.requests.values()],
            )
            for s in sessions
        ],
        [repr(each) for each in pool.quarantine],
        (pool.epoch, pool.memory_id, pool.is_suspended),
    )
