"""Configuration of the journal."""

from dataclasses import dataclass
from typing import Final

_MIN_JOURNAL_BYTES: Final = 2**20
_LOGS_PER_JOURNAL: Final = 256


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """Settings of the journal.

    Attributes:
        folder: The journal's folder; empty for no journal.
        max_bytes: Maximum size of all its files together. A log of 1/256 of it is followed by a snapshot.
    """

    folder: str = ""
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.max_bytes < _MIN_JOURNAL_BYTES:
            raise ValueError(f"journal_max_bytes: {self.max_bytes} is less than {_MIN_JOURNAL_BYTES}")

    @property
    def log_bytes(self) -> int:
        """Size of a log after which a snapshot replaces it."""
        return self.max_bytes // _LOGS_PER_JOURNAL
