"""Tests of journal/frames.py; they cite its rules."""

import io

import pytest

from kvpool.server.journal.frames import MAGIC, DamageError, FrameKind, FrameReader, encode_frame

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
