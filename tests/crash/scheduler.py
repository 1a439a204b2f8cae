"""A scheduler process of a run: `python -m crash.scheduler SETTINGS`. Runs random work until SIGTERM."""

import json
import os
import random
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from crash.execution import Executor, OnRanks, OwnMemory
from crash.memory import Memory, Progress, StepLock
from crash.player import Place, Player
from crash.records import BriefLog, Log
from kvpool.client import (
    AbortedError,
    Client,
    DeadlineError,
    FullAttentionSpec,
    KVCacheGroup,
    KvpoolError,
    NotFoundError,
    PoolConfig,
    Session,
    SlidingWindowSpec,
    UnavailableError,
    WrongStateError,
)
from kvpool.client.transports.blocking_grpc import BlockingGrpcTransport
from kvpool.client.transports.transport import OpenedSession, SessionOptions
from kvpool.core.ids import PoolName
from kvpool.core.steps.columns import Operation, Step, StepResult

LONGEST_TOKENS = 96
DECLARED_POOL = "declared"
RANKED_POOL = "ranked"
LENT_POOL = "lent"
_MOST_ROUNDS = 1000
"""Number of rounds after which a scheduler closes its session and opens another."""
_TRY_AGAIN = (UnavailableError, DeadlineError, NotFoundError, WrongStateError)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a scheduler process.

    Attributes:
        address: Address of the server.
        folder: Folder of logs and memory.
        slot: Index of the scheduler, from 0.
        life: Number of earlier processes of this scheduler.
        seed: Seed of the run.
        ranks: Number of ranks that form its pool; with 0 it creates the pool.
        lender: Address of the lender whose memory it maps; empty for none.
        num_blocks: Blocks of a pool that it creates.
        lease_seconds: Lease of its sessions.
        step_seconds: Maximum duration of a step.
        is_brief: Whether it logs the times of its steps only.
    """

    address: str
    folder: str
    slot: int
    life: int
    seed: int
    ranks: int = 0
    lender: str = ""
    num_blocks: int = 240
    lease_seconds: float = 2.0
    step_seconds: float = 0.01
    is_brief: bool = False

    @property
    def pool(self) -> str:
        """Name of its pool."""
        if self.lender:
            return LENT_POOL
        return RANKED_POOL if self.ranks else DECLARED_POOL

    @property
    def name(self) -> str:
        """Its name, also of its files."""
        return f"scheduler-{self.slot}"

    def command(self) -> list[str]:
        """Command that starts the process."""
        return [sys.executable, "-m", "crash.scheduler", json.dumps(asdict(self))]


class _TwiceTransport(BlockingGrpcTransport):
    """Repeats some steps after they were answered: the answer must be the same. Collects the blocks that they give."""

    log: Log
    chance: random.Random
    given: set[int]

    async def open_session(self, options: SessionOptions) -> OpenedSession:
        opened = await super().open_session(options)
        calls: Any = opened.calls
        once = calls.exchange

        async def twice(step: Step) -> StepResult:
            result: StepResult = await once(step)
            self._collect(step, result)
            if self.chance.random() < 0.05 and await once(step) != result:
                self.log.write("violation", what="ANSWERED_DIFFERENTLY", seq=step.sequence)
            return result

        calls.exchange = twice
        return opened

    def _collect(self, step: Step, result: StepResult) -> None:
        ids, count = iter(result.block_ids), len(step.operations)
        num_new, num_hit = _by_row(result.num_new_blocks, count), _by_row(result.num_prefix_blocks, count)
        new = list[int]()
        for operation, hits, blocks in zip(step.operations, num_hit, num_new, strict=True):
            deque(islice(ids, 0 if operation == Operation.COMMON_PREFIX else hits), 0)
            new += islice(ids, blocks)
        if len(new) != len(set(new)):
            self.log.write("violation", what="GIVEN_TWICE", blocks=new)
        self.given.update(new)


def _by_row(counts: list[int], num_rows: int) -> list[int]:
    """Sums a column of counts per group, which may be empty, to one count per operation."""
    num_groups = len(counts) // num_rows if num_rows else 0
    return [sum(counts[i * num_groups : (i + 1) * num_groups]) for i in range(num_rows)]


def main() -> None:
    """Runs until SIGTERM, or until its parent process ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    folder = Path(settings.folder)
    chance = random.Random(f"{settings.seed} {settings.slot} {settings.life}")  # noqa: S311 - a workload
    log = (BriefLog if settings.is_brief else Log)(folder / f"{settings.name}.jsonl")
    transport = _TwiceTransport(settings.address, 10.0)
    transport.log, transport.chance, transport.given = log, chance, set()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    parent = os.getppid()
    with Client(transport) as client:
        while not stopping and os.getppid() == parent:
            transport.given.clear()
            player = _open(client, settings, log, chance, transport.given)
            if player is None:
                time.sleep(0.05)
                continue
            try:
                rounds = chance.randint(100, _MOST_ROUNDS)
                while rounds and not stopping and os.getppid() == parent:
                    player.play_round()
                    rounds -= 1
                _close(player.session, log)
            except (AbortedError, NotFoundError, UnavailableError, DeadlineError) as error:
                log.write("lost", reason=error.reason, error=str(error))
            except KvpoolError as error:
                player.violated("REFUSED", error=f"{type(error).__name__} {error.reason} {error}")
                log.write("lost", reason=error.reason, error=str(error))
            finally:
                player.executor.close()


def _close(session: Session, log: Log) -> None:
    try:
        session.close()
    except (UnavailableError, DeadlineError) as error:
        log.write("left", reason=error.reason)
    else:
        log.write("closed")


def _open(client: Client, settings: Settings, log: Log, chance: random.Random, given: set[int]) -> Player | None:
    lent = None
    if settings.lender:
        from crash.lent import OnLentMemory  # noqa: PLC0415 - imports torch

        try:
            lent = OnLentMemory(settings.lender, settings.name, LONGEST_TOKENS)
        except KvpoolError as error:  # the lender or the server is away
            log.write("not mapped", reason=error.reason)
            return None
    sent_seconds = time.monotonic()
    try:
        if not settings.ranks and not lent:
            client.create_pool(declared_pool(settings.num_blocks))
        session = client.open_session(
            settings.pool,
            client_name=settings.name,
            lease_seconds=settings.lease_seconds,
            reserve_tokens=chance.choice((0, 0, 4, 16)),
        )
    except _TRY_AGAIN as error:
        log.write("not opened", reason=error.reason)
        if lent:
            lent.close()
        return None
    log.write(
        "opened", pool=settings.pool, incarnation=incarnation(session), sent=sent_seconds, lease=session.lease_seconds
    )
    folder = Path(settings.folder)
    place = Place(log, Progress(folder), settings.slot, settings.step_seconds, given)
    executor: Executor
    if lent:
        executor, lent.lease = lent, session.table_lease
    elif settings.ranks:
        executor = OnRanks(folder, settings.ranks, session.table_lease)
    else:
        memory = Memory(folder, incarnation(session), session.config.num_blocks)
        executor = OwnMemory(memory, StepLock(folder / f"{settings.name}.lock"), session)
    return Player(session, place, settings.seed, chance, executor)


def declared_pool(num_blocks: int) -> PoolConfig:
    """Configuration of the pool that schedulers create: full and sliding attention, with few blocks."""
    groups = (
        KVCacheGroup(FullAttentionSpec(4), ("full",)),
        KVCacheGroup(SlidingWindowSpec(4, sliding_window=12), ("sliding",)),
    )
    return PoolConfig(PoolName(DECLARED_POOL), num_blocks, LONGEST_TOKENS, groups)


def incarnation(session: Session) -> str:
    """Incarnation of a session's pool."""
    return f"{session.config.hash_scheme.none_hash.hex()[:16]}-{session.epoch}"


if __name__ == "__main__":
    main()
