"""What a journal tells of itself."""

from dataclasses import dataclass


@dataclass(slots=True)
class JournalCounts:
    """What a journal did so far.

    Attributes:
        is_up: Whether the server could be killed now and come back as it is.
        size_bytes: What its files take.
        records: Changes written.
        snapshots: Snapshots written whole.
        snapshot_seconds: How long the newest took, from the moment it tells of until it was whole.
        stopped_seconds: For how long of it nothing else could be done.
        failures: Times that the journal was given up.
        recovery_seconds: How long reading it took when the server started.
    """

    is_up: bool = False
    size_bytes: int = 0
    records: int = 0
    snapshots: int = 0
    snapshot_seconds: float = 0.0
    stopped_seconds: float = 0.0
    failures: int = 0
    recovery_seconds: float = 0.0
