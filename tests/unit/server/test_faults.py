"""Fault points: off they do nothing; armed they strike at the passing that was named, and no other."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.server import faults

SERVER = Path(faults.__file__).parent


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


@pytest.fixture(name="signals")
def fixture_signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What this process would have sent itself."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def test_nothing_happens_where_nothing_is_armed(signals: list[tuple[int, int]]) -> None:
    for point in faults.POINTS:
        faults.reach(point)
    assert not signals


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_signal_strikes_at_one_passing_only(action: str, number: int, signals: list[tuple[int, int]]) -> None:
    faults.arm(f"step.applied:{action}:3")
    struck = []
    for _ in range(5):
        faults.reach("step.decoded")
        faults.reach("step.applied")
        struck.append(len(signals))
    assert struck == [0, 0, 1, 1, 1]
    assert signals == [(os.getpid(), number)]


def test_an_error_is_raised() -> None:
    faults.arm("step.decoded:error:1")
    with pytest.raises(OSError, match="armed to fail"):
        faults.reach("step.decoded")
    faults.reach("step.decoded")


def test_a_pause_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    faults.arm("step.decoded:sleep=1.5:2")
    faults.reach("step.decoded")
    faults.reach("step.decoded")
    assert slept == [1.5]


def test_a_chance_is_drawn_from_its_seed(signals: list[tuple[int, int]]) -> None:
    def passings() -> list[int]:
        faults.arm("step.applied:kill:0.1@7")
        signals.clear()
        struck: list[int] = []
        for i in range(200):
            faults.reach("step.applied")
            if len(signals) > len(struck):
                struck.append(i)
        return struck

    first = passings()
    assert 5 < len(first) < 60
    assert passings() == first


def test_several_can_be_armed_and_arming_anew_replaces_them(signals: list[tuple[int, int]]) -> None:
    faults.arm("step.applied:kill:1,step.applied:stop:2,step.decoded:kill:1")
    faults.arm("step.applied:kill:1,step.applied:stop:2")
    faults.reach("step.decoded")
    faults.reach("step.applied")
    faults.reach("step.applied")
    assert [number for _, number in signals] == [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("step.aplied:kill:1", "'step.aplied' is no fault point"),
        ("step.applied:die:1", "'die' is no action"),
        ("step.applied:kill", "not POINT:ACTION:WHEN"),
        ("step.applied:kill:often", "'often' is no number"),
        ("step.applied:kill:seldom@7", "'seldom' is no number"),
        ("step.applied:sleep=long:1", "'long' is no number"),
        ("step.applied:kill:1,nowhere:kill:1", "'nowhere' is no fault point"),
    ],
)
def test_what_cannot_be_armed_is_refused_and_changes_nothing(
    text: str, wrong: str, signals: list[tuple[int, int]]
) -> None:
    faults.arm("step.decoded:kill:1")
    with pytest.raises(ValueError, match=re.escape(wrong)):
        faults.arm(text)
    faults.reach("step.applied")
    faults.reach("step.decoded")
    assert len(signals) == 1


def test_what_is_armed_is_known() -> None:
    faults.arm("journal.half_written:kill:9")
    assert faults.is_armed("journal.half_written")
    assert not faults.is_armed("step.applied")


def test_a_name_that_is_no_point_is_found_where_it_is_passed() -> None:
    faults.arm("step.decoded:kill:1")
    with pytest.raises(ValueError, match="no fault point"):
        faults.reach("step.forgotten")


def test_every_point_stands_somewhere_and_none_stands_unnamed() -> None:
    text = "".join(path.read_text() for path in SERVER.rglob("*.py"))
    assert set(re.findall(r'faults\.reach\("([^"]+)"\)', text)) == faults.POINTS
