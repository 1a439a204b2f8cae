"""The kinds of integer, string and bytes that name things, kept apart by type."""

from dataclasses import dataclass
from typing import Final, NewType, TypeAlias

BlockId = NewType("BlockId", int)
"""Index of a block in its pool, [0, num_blocks)."""

BlockHash = NewType("BlockHash", bytes)
"""What a full block's contents are found by. Covers the block's tokens, all before them, and the extra keys."""

GroupId = NewType("GroupId", int)
"""Index of a KV cache group in its pool."""

PoolName: TypeAlias = str  # an alias, so that callers pass plain strings
SessionId = NewType("SessionId", str)

SessionNumber = NewType("SessionNumber", int)
"""A session's number in its pool, never used again: says who filled a block."""

RequestId = NewType("RequestId", str)
"""A request's name, unique in its session."""

RequestNumber = NewType("RequestNumber", int)
"""A request's number in the columns of a step, unique in its session."""

StepNumber = NewType("StepNumber", int)
"""Number of a session's change, from 1, without gaps."""


@dataclass(frozen=True, slots=True)
class TableLease:
    """What block tables are good for: goes with them from the scheduler to the ranks, which check it before a step.

    Attributes:
        epoch: The pool's epoch in which the session was opened.
        session_number: The session's number.
    """

    epoch: int
    session_number: SessionNumber


NULL_BLOCK: Final = BlockId(0)
"""Stands in a block table where no block is needed. Never free, never given."""

MAX_BLOCKS: Final = 2**31 - 1
MAX_TOKENS: Final = 2**31 - 1
