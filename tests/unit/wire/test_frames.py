"""Frames on a stream of bytes."""

from kvpool.core.errors import ExhaustedError, InvalidArgumentError
from kvpool.wire.frames import HEAD, FrameReader, State, encode_frame
from kvpool.wire.link import Kind, server_state
from support.refusals import refused

SECOND = State("second", {2: (8, State("over"))})
FIRST = State("first", {1: (8, SECOND)})
"""A frame of kind 1, and then one of kind 2."""


def test_a_frame_is_a_head_of_five_bytes_and_a_payload() -> None:
    assert encode_frame(4, b"ab") == b"\x02\0\0\0\x04ab"
    assert len(encode_frame(255, b"")) == HEAD.size == 5


def test_frames_that_arrive_together_are_taken_in_order() -> None:
    reader, frames = FrameReader(FIRST), [(1, b""), (2, bytes(8))]
    assert reader.feed(b"".join(encode_frame(*frame) for frame in frames)) == frames
    assert (reader.state.name, bytes(reader.torn)) == ("over", b"")


def test_the_state_changes_when_the_head_is_complete() -> None:
    reader, frame = FrameReader(FIRST), encode_frame(1, b"abc")
    for at in range(1, len(frame)):
        assert reader.feed(frame[at - 1 : at]) == []
        assert (reader.state, bytes(reader.torn)) == (SECOND if at >= HEAD.size else FIRST, frame[:at])
    assert reader.feed(frame[-1:] + frame[:2]) == [(1, b"abc")]
    assert (reader.state, bytes(reader.torn)) == (SECOND, frame[:2])


def test_a_size_above_the_maximum_is_refused_from_the_head_and_what_follows_too() -> None:
    reader, frame = FrameReader(FIRST), encode_frame(1, bytes(9))
    assert reader.feed(frame[:4]) == []
    for data in (frame[4:5], frame[5:], encode_frame(1, b"")):
        with refused(ExhaustedError, reason="MESSAGE_TOO_LARGE", match="9 bytes; the maximum is 8"):
            reader.feed(data)
    assert reader.state is FIRST


def test_another_kind_is_refused_from_the_head_and_what_follows_too() -> None:
    reader = FrameReader(FIRST)
    for data in (encode_frame(2, b"ab")[: HEAD.size], b"ab", encode_frame(1, b"")):
        text = "a frame of kind 2 may not come while the link is first"
        with refused(InvalidArgumentError, field="kind", reason="MALFORMED", match=text):
            reader.feed(data)
    assert reader.state is FIRST


def test_more_frames_than_wanted_wait_for_the_next_call() -> None:
    reader, frames = FrameReader(server_state(8)), [(Kind.HELLO, b""), *((Kind.REQUEST, bytes([i])) for i in range(4))]
    assert reader.feed(b"".join(encode_frame(*frame) for frame in frames), 2) == frames[:2]
    assert (reader.feed(b"", 0), reader.feed(b"", 2), reader.feed(b"")) == ([], frames[2:4], frames[4:])
