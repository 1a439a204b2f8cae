"""On what terms an allocation is made, where they are not the usual ones."""

from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True, slots=True)
class AllocationOptions:
    """The terms of one allocation.

    Attributes:
        num_external_tokens: Tokens after the hit whose contents are brought from elsewhere, for a request that holds no
            blocks: they get room, and count as computed.
        num_in_flight_tokens: Of the computed tokens, those of steps that may be running yet: blocks that these look at
            do not fall behind a window.
        num_reserved_blocks: Blocks that must stay free beside what is given, of those that the session can be given.
        num_watermark_blocks: The same, and beside what `full_sequence_must_fit` asks for.
        full_sequence_must_fit: Whether nothing is given unless the blocks are free that all known tokens of the request
            take, most at a time.
    """

    num_external_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_reserved_blocks: int = 0
    num_watermark_blocks: int = 0
    full_sequence_must_fit: bool = False


DEFAULT_OPTIONS: Final = AllocationOptions()
OPTION_COLUMNS: Final = tuple(field.name for field in fields(AllocationOptions))
"""The columns of a step that they stand in."""
