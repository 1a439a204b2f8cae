"""The recorder of a primary: the journal first, then the standbys."""

import os
from pathlib import Path

import pytest

from kvpool.core.commands import Drain
from kvpool.server.cluster.recorder import Recorder
from kvpool.server.journal.records import encode_record
from support.faults import ArmedFaults
from support.journal import begin, journal_in, kill, recovered
from support.state import driven


class Sent:
    """What would be sent to the standbys, with the number of records in the journal at that time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records: list[bytes] = []
        self.sizes: list[int] = []

    def append(self, record: bytes) -> None:
        self.records.append(record)
        self.sizes.append(sum(path.stat().st_size for path in self._folder.glob("log-*")))


def test_a_record_is_in_the_journal_when_it_is_sent(tmp_path: Path) -> None:
    journal, sent = journal_in(tmp_path), Sent(tmp_path)
    begin(journal)
    before = sum(path.stat().st_size for path in tmp_path.glob("log-*"))
    recorder = Recorder(journal, sent)  # type: ignore[arg-type]
    recorder.record(Drain(None), 1.0, None)
    assert sent.records == [encode_record(Drain(None), 1.0, None)]
    assert sent.sizes[0] > before
    assert recorder.error == ""
    kill(journal)
    assert None in recovered(tmp_path).state.pools.drained


def test_a_record_is_sent_while_the_journal_is_down(tmp_path: Path) -> None:
    journal, sent = journal_in(tmp_path, faults=ArmedFaults("journal.before_write:error:2")), Sent(tmp_path)
    begin(journal)
    driven(journal).drain(None)
    recorder = Recorder(journal, sent)  # type: ignore[arg-type]
    recorder.record(Drain(None), 1.0, None)
    assert len(sent.records) == 1
    assert recorder.error.startswith("WRITE_FAILED")
    kill(journal)


def test_a_command_that_failed_halfway_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby has the state before the command, and so has the journal."""
    journal = journal_in(tmp_path)
    begin(journal)
    driven(journal).drain(None)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    Recorder(journal, Sent(tmp_path)).crash_after_bug("Undrain")  # type: ignore[arg-type]
    assert ended == [70]
    kill(journal)
    assert None in recovered(tmp_path).state.pools.drained
