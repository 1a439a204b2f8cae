"""Tests of journal/frames.py; they cite its rules."""

import io

import pytest

from kvpool.server.journal.frames import MAGIC, DamageError, FrameKind, FrameParser, FrameReader, encode_frame

FRAMES = [(FrameKind.RECORD, b"one"), (FrameKind.SLICE, b""), (FrameKind.RECORD, bytes(range(40)))]
FILE = MAGIC + b"".join(encode_frame(kind, payload) for kind, payload in FRAMES)


def read(content: bytes) -> tuple[list[tuple[FrameKind, bytes]], FrameReader]:
    reader = FrameReader(io.BytesIO(content))
    found = []
    if reader.read_magic():
        while frame := reader.read():
            found.append((frame.kind, frame.payload))
    return found, reader


def test_frames_are_read_as_written() -> None:
    found, reader = read(FILE)
    assert found == FRAMES
    assert not reader.is_torn
    assert reader.end == len(FILE)


def test_a_truncated_file_is_read_up_to_its_last_complete_frame() -> None:
    ends = [len(MAGIC)]
    for kind, payload in FRAMES:
        ends.append(ends[-1] + len(encode_frame(kind, payload)))
    for size in range(len(FILE)):
        found, reader = read(FILE[:size])
        whole = [end for end in ends if end <= size]
        assert found == FRAMES[: max(len(whole) - 1, 0)]
        assert reader.is_torn == (size not in ends)
        assert not whole or reader.end == whole[-1]


def test_a_changed_byte_is_damage_and_not_a_torn_end() -> None:
    for i in range(len(FILE)):
        for flip in (1, 0x80):
            changed = bytearray(FILE)
            changed[i] ^= flip
            with pytest.raises(DamageError):
                read(bytes(changed))


def test_an_unknown_kind_is_damage() -> None:
    frame = encode_frame(99, b"")  # type: ignore[arg-type]
    with pytest.raises(DamageError, match="unknown kind 99"):
        read(MAGIC + frame)


STREAM = b"".join(encode_frame(kind, payload) for kind, payload in FRAMES)


def found_by(parser: FrameParser, received: bytes) -> list[tuple[FrameKind, bytes]]:
    return [(frame.kind, frame.payload) for frame in parser.feed(received)]


@pytest.mark.parametrize("size", [1, 2, 7, 13, 14, 50, len(STREAM)])
def test_a_stream_in_pieces_has_the_same_frames(size: int) -> None:
    parser, found = FrameParser(), []
    for start in range(0, len(STREAM), size):
        found += found_by(parser, STREAM[start : start + size])
    assert found == FRAMES


def test_a_frame_of_a_stream_says_where_it_ends() -> None:
    parser = FrameParser()
    ends = [frame.end for half in (STREAM[:20], STREAM[20:]) for frame in parser.feed(half)]
    sizes = [len(encode_frame(kind, payload)) for kind, payload in FRAMES]
    assert ends == [sum(sizes[: i + 1]) for i in range(len(sizes))]


def test_frames_that_are_not_taken_are_kept() -> None:
    parser = FrameParser()
    frames = parser.feed(STREAM)
    assert next(frames).payload == FRAMES[0][1]
    frames.close()
    assert found_by(parser, b"") == FRAMES[1:]


def test_a_changed_byte_of_a_stream_is_damage() -> None:
    for i in range(len(STREAM)):
        for flip in (1, 0x80):
            changed = bytearray(STREAM)
            changed[i] ^= flip
            with pytest.raises(DamageError):
                found_by(FrameParser(), bytes(changed))


def test_a_frame_that_is_too_large_is_refused_by_its_head() -> None:
    head = encode_frame(FrameKind.HELLO, bytes(101))[:13]
    with pytest.raises(DamageError, match="frame at 0"):
        found_by(FrameParser(100), head)
    assert found_by(FrameParser(101), head) == []


def test_the_maximum_size_can_change_between_two_frames() -> None:
    parser = FrameParser(100)
    frames = parser.feed(encode_frame(FrameKind.HELLO, bytes(100)) + encode_frame(FrameKind.MARK, bytes(20)))
    assert next(frames).kind is FrameKind.HELLO
    parser.max_payload_bytes = 10
    with pytest.raises(DamageError):
        next(frames)


def test_an_unknown_kind_in_a_stream_is_damage() -> None:
    with pytest.raises(DamageError, match="unknown kind 99"):
        found_by(FrameParser(), encode_frame(99, b""))  # type: ignore[arg-type]
