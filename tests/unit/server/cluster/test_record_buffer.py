"""The frames that a primary keeps for its standbys."""

from random import Random

import pytest

from kvpool.server.cluster.record_buffer import MARK, RecordBuffer
from kvpool.server.cluster.standbys import NOTHING


def test_positions_begin_at_zero_and_marks_have_one() -> None:
    buffer, frames = RecordBuffer(2**20), [b"one", MARK, b"two"]
    assert buffer.last_position == NOTHING
    assert buffer.after(NOTHING) == []
    for frame in frames:
        buffer.append(frame)
    assert buffer.last_position == 2
    assert [buffer.after(position) for position in (NOTHING, 0, 1, 2)] == [frames, frames[1:], frames[2:], []]


@pytest.mark.parametrize("position", [3, 2**40, NOTHING - 1])
def test_a_position_that_does_not_exist_has_no_frames(position: int) -> None:
    buffer = RecordBuffer(2**20)
    for _ in range(3):
        buffer.append(MARK)
    assert buffer.after(position) is None


def test_old_frames_are_dropped_and_the_newest_is_kept() -> None:
    buffer = RecordBuffer(100)
    for _ in range(20):
        buffer.append(bytes(43))
    assert buffer.after(19) == []
    assert buffer.after(17) is not None
    assert buffer.after(16) is None
    buffer.append(bytes(1000))
    assert buffer.after(19) == [bytes(1000)]
    assert buffer.after(18) is None


@pytest.mark.parametrize("seed", range(5))
def test_kept_frames_are_those_that_were_appended(seed: int) -> None:
    random, buffer, appended = Random(seed), RecordBuffer(500), []  # noqa: S311 - a workload
    for _ in range(200):
        appended.append(bytes(random.randrange(13, 133)))
        buffer.append(appended[-1])
        position = random.randrange(NOTHING, len(appended))
        kept = buffer.after(position)
        wanted = appended[position + 1 :]
        assert kept == wanted if sum(map(len, wanted)) <= 500 else kept in (None, wanted[-1:])
