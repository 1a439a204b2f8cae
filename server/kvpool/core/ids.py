"""Types of identifiers, one `NewType` for each kind of id."""

from dataclasses import dataclass
from typing import Final, NewType, TypeAlias

BlockId = NewType("BlockId", int)
"""Index of a block in its pool, [0, num_blocks); those of host memory follow."""

BlockHash = NewType("BlockHash", bytes)
"""Hash under which a full block is cached. It covers the block's tokens, all tokens before them, and the extra keys."""

GroupId = NewType("GroupId", int)
"""Index of a KV cache group in its pool."""

MapId = NewType("MapId", int)
"""Index of a map of a pool's prefix map: the cached blocks of one group in one scope."""

MAX_CLIENT_NAME_BYTES: Final = 256
"""Maximum length of the name that a scheduler, or a process that maps memory, reports for display."""

Scope: TypeAlias = tuple[bytes, str]
"""What separates cached blocks in a prefix map: a session's namespace, an opaque value, and its weights version."""

PoolName: TypeAlias = str  # an alias, so that callers pass plain strings
SessionId = NewType("SessionId", str)

SessionNumber = NewType("SessionNumber", int)
"""Number of a session in its pool, never reused. Identifies the session that filled a block."""

RequestId = NewType("RequestId", str)
"""Name of a request, unique in its session."""

RequestNumber = NewType("RequestNumber", int)
"""Number of a request in the columns of a step, unique in its session."""

StepNumber = NewType("StepNumber", int)
"""Number of a session's step: consecutive, starting at 1."""


@dataclass(frozen=True, slots=True)
class TableLease:
    """Validity of block tables. The scheduler sends it with the tables, and ranks check it before a step.

    Attributes:
        epoch: Epoch of the pool in which the session was opened.
        session_number: Number of the session.
    """

    epoch: int
    session_number: SessionNumber


NULL_BLOCK: Final = BlockId(0)
"""Placeholder in a block table where no block is needed. It is never free and never allocated."""

MAX_BLOCKS: Final = 2**31 - 1
MAX_TOKENS: Final = 2**31 - 1
