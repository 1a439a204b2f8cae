"""Attacks by small steps for which the server might do much work, in states that the attacker has built."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from attacks.attack import Assault
from kvpool.client import FullAttentionSpec, KVCacheGroup, MambaSpec, PoolConfig
from kvpool.core.steps.columns import Operation
from kvpool.v1 import allocator_pb2_grpc
from support.greedy_client import GreedySession
from support.server import pool_config

_POOL: Final = "attacked"
_HELD: Final = 61_440
_WAITING: Final = 20_000
_ROWS: Final = 256
_STEP_ROWS: Final = 512
_LOOKUPS: Final = 128
_HASHES: Final = 2**13


def hold_chunks(assault: Assault) -> None:
    """Frees 61,440 blocks one by one under a step that never runs; then another session admits 256, and again."""
    with _stub(assault, pool_config(_POOL, _HELD + 2 * _ROWS)) as stub:
        one, other = GreedySession(stub, _POOL), GreedySession(stub, _POOL)
        for first in range(1, _HELD, _STEP_ROWS):
            one.step(**_declared(Operation.ADMIT, first, _STEP_ROWS, 1))
        for first in range(1, _HELD, _STEP_ROWS):
            one.step(**_rows(Operation.FREE, first, _STEP_ROWS), launched_sequence=1)
        while not assault.is_over.is_set():
            result = other.step(**_declared(Operation.ADMIT, 1, _ROWS, 1))
            assert len(result.block_ids) == _ROWS, result.outcomes[:1]
            other.step(**_rows(Operation.FREE, 1, _ROWS))


def sample_hashes(assault: Assault) -> None:
    """Looks up 128 requests of 8,192 hashes that begin alike, in steps of less than 1 KiB."""
    with _stub(assault, replace(pool_config(_POOL, 64), max_model_len=8 * _HASHES)) as stub:
        session = GreedySession(stub, _POOL)
        for first in range(1, _LOOKUPS, 32):
            hashes = b"".join(bytes(2) + os.urandom(30) for _ in range(32 * _HASHES))
            session.step(**_declared(Operation.APPEND, first, 32, 4 * _HASHES), block_hashes=hashes)
        while not assault.is_over.is_set():
            session.step(**_rows(Operation.LOOKUP_COUNTED_AT_ONCE, 1, _LOOKUPS))


def hit_states(assault: Assault) -> None:
    """Admits 256 requests that hit a state beside 20,000 waiting requests, and frees them, again and again."""
    state, first_own = MambaSpec(4, only_step_ends=True), _WAITING + 1
    groups = KVCacheGroup(FullAttentionSpec(4), ("layer.0",)), KVCacheGroup(state, ("layer.1",))
    hit, own = os.urandom(32), [os.urandom(32) for _ in range(_ROWS)]
    with _stub(assault, replace(pool_config(_POOL, 16 * _ROWS), groups=groups)) as stub:
        session = GreedySession(stub, _POOL)
        for first in range(1, _WAITING, _STEP_ROWS):
            count = min(_STEP_ROWS, first_own - first)
            session.step(**_declared(Operation.APPEND, first, count, 6), block_hashes=hit * count)
        session.step(**_rows(Operation.ADMIT, 1, 1), num_new_tokens=[4])
        admissions = _declared(Operation.ADMIT, first_own, _ROWS, 10)
        while not assault.is_over.is_set():
            result = session.step(**admissions, block_hashes=b"".join(hit + each for each in own))
            assert all(result.num_hit_tokens), "nothing is hit"
            session.step(**_rows(Operation.FREE, first_own, _ROWS))
            own = [hashlib.sha256(each).digest() for each in own]


@contextmanager
def _stub(assault: Assault, config: PoolConfig) -> Iterator[allocator_pb2_grpc.AllocatorServiceStub]:
    with assault.target.connect("attacker") as client, assault.target.channel("attacker") as channel:
        client.create_pool(config)
        yield allocator_pb2_grpc.AllocatorServiceStub(channel)


def _rows(operation: Operation, first: int, count: int) -> dict[str, Any]:
    return {"operations": [operation] * count, "request_numbers": [*range(first, first + count)]}


def _declared(operation: Operation, first: int, count: int, num_tokens: int) -> dict[str, Any]:
    ids = [str(number) for number in range(first, first + count)]
    declared = {"declares": [True] * count, "request_ids": ids, "num_appended_tokens": [num_tokens] * count}
    return {**_rows(operation, first, count), **declared}
