"""Tests of journal/snapshot.py: anything but all frames of a snapshot, in order, is refused."""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest

from kvpool.core.steps.columns import Operation
from kvpool.server.codec import DamageError, dumps, loads
from kvpool.server.journal.frames import Frame, FrameKind, FrameParser, encode_frame
from kvpool.server.journal.snapshot import full_pool_bytes, load_snapshot, snapshot_frames
from support.core import World, block_hashes, config
from support.journal import Traffic, assert_alike
from support.state import DrivenState


@pytest.fixture(scope="module", name="state")
def fixture_state() -> DrivenState:
    state = DrivenState()
    Traffic(state, config(30, enable_events=True), seed=3).changes(40)
    return state


@pytest.fixture(name="frames")
def fixture_frames(state: DrivenState) -> list[Frame]:
    with state.snapshot() as snapshot:
        return list(FrameParser().feed(b"".join(snapshot_frames(snapshot))))


def read(frames: list[Frame]) -> DrivenState:
    made = DrivenState()
    load_snapshot(made, iter(frames))
    return made


def frame(kind: FrameKind, plain: object) -> Frame:
    return Frame(kind, encode_frame(kind, dumps(plain)))


def test_a_snapshot_is_read(state: DrivenState, frames: list[Frame]) -> None:
    assert_alike(state, read(frames))


@pytest.mark.parametrize("options", [{}, {"enable_caching": False}, {"enable_events": True}])
def test_the_size_of_a_full_snapshot_is_known(options: dict[str, Any]) -> None:
    world = World(3201, **options)
    session = world.open()
    for number in range(1, 51):
        joined = block_hashes(chr(64 + number), 64) if world.pool.config.enable_caching else b""
        columns: dict[str, Any] = {"request_numbers": [number], "request_ids": [f"r{number}"], "block_hashes": joined}
        if world.pool.config.makes_events:
            columns["token_ids"] = list(range(256))
        world.run(session, Operation.ADMIT, num_appended_tokens=[256], **columns)
    for number in range(1, 51):
        world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[number])
    world.allocator.close_session(session.session_id, 0.0)
    with world.allocator.snapshot() as snapshot:
        written = sum(map(len, snapshot_frames(snapshot)))
    assert full_pool_bytes(world.pool.config) == pytest.approx(written, rel=0.1)


def test_the_size_of_a_snapshot_counts_blocks_of_both_tiers() -> None:
    assert full_pool_bytes(config(100, num_host_blocks=200)) == full_pool_bytes(config(300))


def test_a_frame_that_is_missing_repeated_or_early_is_damage(frames: list[Frame]) -> None:
    spoiled = [[frames[0], frames[2], frames[1], *frames[3:]]]
    for at in range(len(frames)):
        spoiled += [frames[:at] + frames[at + 1 :], frames[: at + 1] + frames[at:]]
    for each in spoiled:
        with pytest.raises(DamageError):
            read(each)


def _renamed(plain: dict[str, object]) -> None:
    plain["new_name"] = plain.pop("past_epoch")


WAYS: dict[str, Callable[[dict[str, object]], object]] = {
    "a missing field": lambda plain: plain.pop("past_epoch"),
    "an additional field": lambda plain: plain.update(more=1),
    "a renamed field": _renamed,
    "another type": lambda plain: plain.update(past_epoch="1"),
    "a column that does not exist": lambda plain: plain.update(ends="x"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_snapshot_of_another_version_is_damage(frames: list[Frame], way: str) -> None:
    plain = loads(frames[0].payload)
    WAYS[way](plain)
    with pytest.raises(DamageError):
        read([frame(FrameKind.SNAPSHOT, plain), frame(FrameKind.END, crc32(dumps(plain)))])


@pytest.mark.parametrize("plain", [None, 7, "abc", [], [1, 2, 3], ["0", []], [0, None], {"m": 1}])
@pytest.mark.parametrize("kind", FrameKind)
def test_malformed_frames_are_damage(frames: list[Frame], kind: FrameKind, plain: object) -> None:
    for before in ([], frames[:1]):
        with pytest.raises(DamageError):
            read([*before, frame(kind, plain), frames[-1]])
