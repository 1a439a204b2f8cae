"""Settings of a journal."""

from dataclasses import dataclass
from typing import Final

DEFAULT_MAX_BYTES: Final = 2**30
_MIN_BYTES: Final = 2**20
_LOGS_PER_FOLDER: Final = 256


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """Where a server writes down what changes.

    Attributes:
        folder: The folder; empty for no journal.
        max_bytes: Most that its files may take together. A log of a 256th of it is followed by a snapshot.
        retry_seconds: After how long a journal that could not be written is begun anew.
    """

    folder: str = ""
    max_bytes: int = DEFAULT_MAX_BYTES
    retry_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.max_bytes < _MIN_BYTES:
            raise ValueError(f"journal_max_bytes: {self.max_bytes} is less than {_MIN_BYTES}")
        if not 0.01 <= self.retry_seconds <= 3600:  # noqa: PLR2004 - the message states it
            raise ValueError(f"retry_seconds: {self.retry_seconds} is not in [0.01, 3600]")

    @property
    def log_bytes(self) -> int:
        """How long a log grows before a snapshot takes its place."""
        return self.max_bytes // _LOGS_PER_FOLDER
