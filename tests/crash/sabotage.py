"""`kvpool` with one bug built in: `python -m crash.sabotage BUG serve ...`. The checks of a run must find it."""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.cli import main
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.commands import Command
from kvpool.core.ids import BlockId, GroupId, MapId
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import StepResult
from kvpool.server.cluster.gate import Gate
from kvpool.server.journal.journal import Journal


def give_held_blocks() -> None:
    """Sometimes allocates a block again while its first owner still holds it."""
    take, passings = BlockPool.get_new_blocks, itertools.count(1)
    given: list[BlockId] = []

    def faulty(pool: BlockPool, group_id: GroupId, count: int) -> list[BlockId]:
        taken = take(pool, group_id, count)
        if taken and next(passings) % 50 == 0 and (held := [each for each in given[-20:] if pool.ref_cnt(each)]):
            taken[0] = held[0]
            pool.touch(group_id, taken[:1])
        given.extend(taken)
        return taken

    BlockPool.get_new_blocks = faulty  # type: ignore[method-assign, assignment]  # the bug


def mix_up_hits() -> None:
    """Sometimes returns another block as a hit."""
    find, passings = PrefixMap.find, itertools.count(1)

    def faulty(prefixes: PrefixMap, map_id: MapId, *args: Any) -> list[BlockId]:
        found = find(prefixes, map_id, *args)
        hashed = (block for _, _, block in prefixes.entries() if prefixes.map_id(block) == map_id)
        others = (block for block in hashed if block not in found)
        if found and next(passings) % 50 == 0:
            found[-1] = next(others, found[-1])
        return found

    PrefixMap.find = faulty  # type: ignore[method-assign, assignment]  # the bug


def forget_answers() -> None:
    """Answers a repeated step with an empty result."""
    answered = Session.remembered_result

    def faulty(session: Session, sequence: int, message: bytes) -> StepResult | None:
        result = answered(session, sequence, message)
        return result and StepResult(result.sequence, result.free_blocks)

    Session.remembered_result = faulty  # type: ignore[method-assign, assignment]  # the bug


def leak_blocks() -> None:
    """Sometimes loses a freed block."""
    release, passings = BlockPool.free_blocks, itertools.count(1)

    def faulty(
        pool: BlockPool, group_id: GroupId, block_ids: Sequence[BlockId], _num_uncached: int | None = None
    ) -> None:
        release(pool, group_id, block_ids[1:] if next(passings) % 200 == 0 else block_ids)

    BlockPool.free_blocks = faulty  # type: ignore[method-assign, assignment]  # the bug


def lose_records() -> None:
    """Sometimes answers a change that is not in the journal."""
    record, passings = Journal.record, itertools.count(1)

    def faulty(journal: Journal, command: Command[Any], now_seconds: float, result: object) -> None:
        if next(passings) % 50:
            record(journal, command, now_seconds, result)

    Journal.record = faulty  # type: ignore[method-assign, assignment]  # the bug


def open_gate() -> None:
    """Answers before the standby has the change."""

    async def faulty(_gate: Gate, _arrived: int | None) -> None:
        pass

    Gate.wait = faulty  # type: ignore[method-assign, assignment]  # the bug


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug for bug in (give_held_blocks, mix_up_hits, forget_answers, leak_blocks, lose_records, open_gate)
}

if __name__ == "__main__":
    BUGS[sys.argv.pop(1)]()
    main()
