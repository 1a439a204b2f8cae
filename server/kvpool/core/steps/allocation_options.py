"""Options of an allocation."""

from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True, slots=True)
class AllocationOptions:
    """Options of one allocation.

    Attributes:
        num_external_tokens: Tokens after the hit whose KV is loaded from elsewhere, for a request without blocks. They
            get slots and count as computed.
        num_in_flight_tokens: The last computed tokens, whose steps may still run. Blocks that these tokens attend to do
            not fall behind a window.
        num_reserved_blocks: Blocks that must stay free after the allocation, of those available to the session.
        num_watermark_blocks: The same; these are also required in addition to the blocks of `full_sequence_must_fit`.
        full_sequence_must_fit: Whether to allocate only if there are enough free blocks for all known tokens of the
            request, at the moment when they take the most.
    """

    num_external_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_reserved_blocks: int = 0
    num_watermark_blocks: int = 0
    full_sequence_must_fit: bool = False


DEFAULT_OPTIONS: Final = AllocationOptions()
OPTION_COLUMNS: Final = tuple(field.name for field in fields(AllocationOptions))
"""Names of the columns of a step that hold the options."""
