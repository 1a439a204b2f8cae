"""Encodes a snapshot of the state as frames, one slice at a time, and decodes it.

The first frame is the `StateSnapshot`, in which each column is a number. Frames with slices of the columns follow. The
last frame holds a checksum of all others, so that a missing frame is detected.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final
from zlib import crc32

from kvpool.core.events import TOKEN_ID_BYTES
from kvpool.core.pools.snapshots import StateSnapshot
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.server.journal.codec import FoundColumn, decode, decode_slice, dumps, encode, encode_slice, loads
from kvpool.server.journal.frames import MALFORMED, DamageError, Frame, FrameKind, encode_frame

_NUM_INT_COLUMNS: Final = 4
"""Columns of ints with an entry per block of a cached pool: reference counts, free blocks, groups, sessions."""
_INT_BYTES: Final = 4
_LENGTH_BYTES: Final = 2


def full_pool_bytes(config: PoolConfig) -> int:
    """Size of the snapshot of a pool whose blocks are all free and cached; its sessions come on top."""
    block_bytes = _NUM_INT_COLUMNS * _INT_BYTES
    if config.enable_caching:
        block_bytes += config.hash_scheme.hash_size_bytes + _LENGTH_BYTES
    if config.makes_events:
        block_bytes += config.hash_block_size * TOKEN_ID_BYTES + config.hash_scheme.hash_size_bytes + 3 * _LENGTH_BYTES
    return config.num_blocks * block_bytes


def snapshot_frames(snapshot: StateSnapshot) -> Iterator[bytes]:
    """Yields the frames of a snapshot. Time per frame: of one slice, or of everything that is in no column."""
    columns: list[FoundColumn] = []
    payload = encode(StateSnapshot, snapshot, columns)
    checksum = crc32(payload)
    yield encode_frame(FrameKind.SNAPSHOT, payload)
    for number, (column, form) in enumerate(columns):
        for piece in column.slices():
            payload = dumps([number, encode_slice(form, piece, columns)])
            checksum = crc32(payload, checksum)
            yield encode_frame(FrameKind.SLICE, payload)
    yield encode_frame(FrameKind.END, dumps(checksum))


def read_snapshot(read: Callable[[], Frame | None]) -> StateSnapshot:
    """Decodes the frames of a snapshot.

    Args:
        read: Returns the next frame; None after the last.

    Raises:
        DamageError: The frames are not a complete snapshot of this version.
    """
    frame = read()
    if frame is None or frame.kind is not FrameKind.SNAPSHOT:
        raise DamageError("does not begin with a snapshot")
    payload, checksum = frame.payload, crc32(frame.payload)
    columns: defaultdict[int, list[object]] = defaultdict(list)
    while (frame := read()) and frame.kind is FrameKind.SLICE:
        checksum = crc32(frame.payload, checksum)
        try:
            number, values = loads(frame.payload)
            columns[number] += decode_slice(values)
        except MALFORMED as error:
            raise DamageError("has a malformed slice") from error
    if frame is None or frame.kind is not FrameKind.END or frame.payload != dumps(checksum) or read():
        raise DamageError("is not a whole snapshot")
    return decode(StateSnapshot, payload, columns)
