"""The frames that a primary keeps for its followers."""

from random import Random

import pytest

from kvpool.server.cluster.log import ReplicationLog
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.journal.frames import FrameKind, encode_frame


def test_positions_begin_at_zero_and_marks_have_one() -> None:
    log = ReplicationLog(2**20)
    assert log.last_position == NOTHING
    assert log.after(NOTHING) == []
    frames = [log.append(b"one"), log.mark(), log.append(b"two")]
    assert frames == [
        encode_frame(FrameKind.RECORD, b"one"),
        encode_frame(FrameKind.MARK, b""),
        encode_frame(FrameKind.RECORD, b"two"),
    ]
    assert log.last_position == 2
    assert [log.after(position) for position in (NOTHING, 0, 1, 2)] == [frames, frames[1:], frames[2:], []]


@pytest.mark.parametrize("position", [3, 2**40, NOTHING - 1])
def test_a_position_that_does_not_exist_has_no_frames(position: int) -> None:
    log = ReplicationLog(2**20)
    for _ in range(3):
        log.mark()
    assert log.after(position) is None


def test_old_frames_are_dropped_and_the_newest_is_kept() -> None:
    log = ReplicationLog(100)
    for _ in range(20):
        log.append(bytes(30))
    assert log.after(19) == []
    assert log.after(17) is not None
    assert log.after(16) is None
    log.append(bytes(1000))
    assert log.after(19) == [encode_frame(FrameKind.RECORD, bytes(1000))]
    assert log.after(18) is None


@pytest.mark.parametrize("seed", range(5))
def test_kept_frames_are_those_that_were_appended(seed: int) -> None:
    random, log, appended = Random(seed), ReplicationLog(500), []  # noqa: S311 - a workload
    for _ in range(200):
        appended.append(log.append(bytes(random.randrange(120))) if random.random() < 0.8 else log.mark())
        position = random.randrange(NOTHING, len(appended))
        kept = log.after(position)
        wanted = appended[position + 1 :]
        assert kept == wanted if sum(map(len, wanted)) <= 500 else kept in (None, wanted[-1:])
