"""Fault points do nothing until they are armed, and then strike at the named visit only."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from kvpool.server import fault_points
from kvpool.server.journal.frames import FrameKind, encode_frame
from support.faults import POINTS, ArmedFaults

SERVER = Path(fault_points.__file__).parent


@pytest.fixture(name="faults")
def fixture_faults() -> ArmedFaults:
    return ArmedFaults()


@pytest.fixture(name="signals")
def fixture_signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that this process would have sent itself."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def test_points_do_nothing_until_armed(signals: list[tuple[int, int]], faults: ArmedFaults) -> None:
    for point in POINTS:
        faults.reach(point)
    assert not signals


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_signal_strikes_at_one_visit_only(
    action: str, number: int, signals: list[tuple[int, int]], faults: ArmedFaults
) -> None:
    faults.arm(f"step.applied:{action}:3")
    struck = []
    for _ in range(5):
        faults.reach("step.decoded")
        faults.reach("step.applied")
        struck.append(len(signals))
    assert struck == [0, 0, 1, 1, 1]
    assert signals == [(os.getpid(), number)]


def test_an_error_is_raised(faults: ArmedFaults) -> None:
    faults.arm("step.decoded:error:1")
    with pytest.raises(OSError, match="armed to fail"):
        faults.reach("step.decoded")
    faults.reach("step.decoded")


def test_a_sleep_blocks_for_its_seconds(monkeypatch: pytest.MonkeyPatch, faults: ArmedFaults) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    faults.arm("step.decoded:sleep=1.5:2")
    faults.reach("step.decoded")
    faults.reach("step.decoded")
    assert slept == [1.5]


def test_a_probability_is_drawn_from_its_seed(signals: list[tuple[int, int]], faults: ArmedFaults) -> None:
    def visits() -> list[int]:
        faults.arm("step.applied:kill:0.1@7")
        signals.clear()
        struck: list[int] = []
        for i in range(200):
            faults.reach("step.applied")
            if len(signals) > len(struck):
                struck.append(i)
        return struck

    first = visits()
    assert 5 < len(first) < 60
    assert visits() == first


def test_arming_again_replaces_all_armed_points(signals: list[tuple[int, int]], faults: ArmedFaults) -> None:
    faults.arm("step.applied:kill:1,step.applied:stop:2,step.decoded:kill:1")
    faults.arm("step.applied:kill:1,step.applied:stop:2")
    faults.reach("step.decoded")
    faults.reach("step.applied")
    faults.reach("step.applied")
    assert [number for _, number in signals] == [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("step.aplied:kill:1", "'step.aplied' is not a fault point"),
        ("step.applied:die:1", "'die' is not an action"),
        ("step.applied:kill", "not POINT:ACTION:WHEN"),
        ("step.applied:kill:often", "'often' is not a number"),
        ("step.applied:kill:seldom@7", "'seldom' is not a number"),
        ("step.applied:sleep=long:1", "'long' is not a number"),
        ("step.applied:kill:1,nowhere:kill:1", "'nowhere' is not a fault point"),
    ],
)
def test_a_malformed_entry_is_refused_and_changes_nothing(
    text: str, wrong: str, signals: list[tuple[int, int]], faults: ArmedFaults
) -> None:
    faults.arm("step.decoded:kill:1")
    with pytest.raises(ValueError, match=re.escape(wrong)):
        faults.arm(text)
    faults.reach("step.applied")
    faults.reach("step.decoded")
    assert len(signals) == 1


def test_a_point_within_the_frames_of_records(faults: ArmedFaults) -> None:
    written: list[bytes] = []
    write = faults.in_halves(lambda _, content: written.append(content))
    record = encode_frame(FrameKind.RECORD, b"record")
    faults.arm("journal.half_written:error:2")
    for frame in (encode_frame(FrameKind.END, b""), record):
        write(7, frame)
    with pytest.raises(OSError, match="armed to fail"):
        write(7, record)
    assert b"".join(written) == encode_frame(FrameKind.END, b"") + record + record[: len(record) // 2]


def test_reaching_an_unknown_point_is_refused(faults: ArmedFaults) -> None:
    faults.arm("step.decoded:kill:1")
    with pytest.raises(ValueError, match="not a fault point"):
        faults.reach("step.forgotten")


def test_the_server_reaches_exactly_the_listed_points() -> None:
    text = "".join(path.read_text() for path in SERVER.rglob("*.py"))
    assert {*re.findall(r'faults\.reach\("([^"]+)"\)', text), "journal.half_written"} == POINTS
