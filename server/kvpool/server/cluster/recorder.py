"""Records commands in the journal of a primary and at its standbys."""

import logging
from typing import Any, NoReturn

from kvpool.core.commands import Command
from kvpool.server.cluster.replicator import Replicator
from kvpool.server.crash import crash
from kvpool.server.journal.journal import Journal
from kvpool.server.journal.records import encode_record

_log = logging.getLogger("kvpool.server.cluster")


class Recorder:
    """Encodes each record once, and gives it to the journal, then to the standbys.

    Args:
        journal: The journal.
        replicator: Sends the records.
    """

    def __init__(self, journal: Journal, replicator: Replicator) -> None:
        self._journal = journal
        self._replicator = replicator

    @property
    def error(self) -> str:
        """Why the journal is down; empty while it is up."""
        return self._journal.error

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        """Records a command that was executed."""
        frame = encode_record(command, now_seconds, result)
        self._journal.write(frame, command)
        self._replicator.append(frame)

    def crash_after_bug(self, method: str) -> NoReturn:
        """Ends the process, because a command failed halfway: another server has the state before it, or after it."""
        _log.critical("bug: a change failed halfway, the server exits", extra={"method": method}, exc_info=True)
        crash()
