"""The progress of a command where stderr is no terminal."""

import pytest

from kvpool.cli import progress


def test_a_line_is_printed_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_seconds = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_seconds)
    with progress.progress("replaying", 2000) as advance:
        for passed_seconds in (9.0, 1.0, 9.0, 2.0):
            now_seconds += passed_seconds
            advance(400)
    assert capsys.readouterr().err.splitlines() == [
        "kvpool: replaying: 800 of 2,000 requests",
        "kvpool: replaying: 1,600 of 2,000 requests",
    ]
