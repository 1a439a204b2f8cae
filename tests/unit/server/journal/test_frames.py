"""Tests of journal/frames.py; they cite its rules."""

import io

import pytest

from kvpool.server.codec import DamageError
from kvpool.server.journal.frames import FrameKind, FrameParser, decode_frame, encode_frame

FRAMES = [(FrameKind.RECORD, b"one"), (FrameKind.SLICE, b""), (FrameKind.RECORD, bytes(range(40)))]
STREAM = b"".join(encode_frame(kind, payload) for kind, payload in FRAMES)
ENDS = [sum(len(encode_frame(*frame)) for frame in FRAMES[:count]) for count in range(len(FRAMES) + 1)]


def found_by(parser: FrameParser, received: bytes) -> list[tuple[FrameKind, bytes]]:
    return [(frame.kind, frame.payload) for frame in parser.feed(received)]


def test_rule_2_a_truncated_file_is_read_up_to_its_last_complete_frame() -> None:
    for size in range(len(STREAM) + 1):
        parser = FrameParser()
        found = [(frame.kind, frame.payload) for frame in parser.read(io.BytesIO(STREAM[:size]))]
        whole = [end for end in ENDS if end <= size]
        assert found == FRAMES[: len(whole) - 1]
        assert parser.is_torn == (size not in ENDS)
        assert parser.end == whole[-1]


@pytest.mark.parametrize("size", [1, 2, 7, 13, 14, 50, len(STREAM)])
def test_a_stream_in_pieces_has_the_same_frames(size: int) -> None:
    parser, found = FrameParser(), []
    for start in range(0, len(STREAM), size):
        found += found_by(parser, STREAM[start : start + size])
    assert found == FRAMES
    assert not parser.is_torn


def test_a_frame_keeps_the_bytes_that_were_written() -> None:
    parser, encoded = FrameParser(), []
    for frame, end in zip(parser.feed(STREAM), ENDS[1:], strict=True):
        encoded.append(frame.encoded)
        assert parser.end == end
    assert b"".join(encoded) == STREAM


def test_frames_that_are_not_taken_are_kept() -> None:
    parser = FrameParser()
    assert next(parser.feed(STREAM)).payload == FRAMES[0][1]
    assert found_by(parser, b"") == FRAMES[1:]


def test_rule_2_a_changed_byte_is_damage_and_not_a_torn_end() -> None:
    for i in range(len(STREAM)):
        for flip in (1, 0x80):
            changed = bytearray(STREAM)
            changed[i] ^= flip
            with pytest.raises(DamageError):
                found_by(FrameParser(), bytes(changed))


def test_one_frame_is_decoded_as_it_was_encoded_and_nothing_else_is() -> None:
    encoded = encode_frame(*FRAMES[0])
    frame = decode_frame(encoded)
    assert (frame.kind, frame.payload, frame.encoded) == (*FRAMES[0], encoded)
    for other in (b"", encoded[:12], encoded[:-1], encoded + b"x", encoded[:-1] + b"x"):
        with pytest.raises(DamageError):
            decode_frame(other)


def test_an_unknown_kind_is_damage() -> None:
    with pytest.raises(DamageError, match="unknown kind 99"):
        found_by(FrameParser(), encode_frame(99, b""))  # type: ignore[arg-type]
