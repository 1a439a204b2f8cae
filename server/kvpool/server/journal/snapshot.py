"""Encodes a snapshot of the state as frames, one slice at a time, and loads it at recovery and at standbys.

The first frame is the `StateSnapshot`, in which each column is a number. Frames with slices of the columns follow. The
last frame holds a checksum of all others, so that a missing frame is detected.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final
from zlib import crc32

from kvpool.core.errors import KvpoolError
from kvpool.core.events import TOKEN_ID_BYTES
from kvpool.core.pools.snapshots import StateSnapshot
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.server.codec import MALFORMED, DamageError, decode, dumps, encode_apart, loads, values_of_slice
from kvpool.server.journal.frames import Frame, FrameKind, encode_frame
from kvpool.server.journal.records import hold_leases

_NUM_INT_COLUMNS: Final = 4
"""Columns of ints with an entry per block of a cached pool: reference counts, free blocks, groups, sessions."""
_INT_BYTES: Final = 4
_LENGTH_BYTES: Final = 2


def full_pool_bytes(config: PoolConfig) -> int:
    """Size of the snapshot of a pool whose blocks are all free and cached.

    Its sessions come on top, and what it remembers of evictions and a reset: up to 9 bytes per block.
    """
    block_bytes = _NUM_INT_COLUMNS * _INT_BYTES
    if config.enable_caching:
        block_bytes += config.hash_scheme.hash_size_bytes + _LENGTH_BYTES
    if config.makes_events:
        block_bytes += config.hash_block_size * TOKEN_ID_BYTES + config.hash_scheme.hash_size_bytes + 3 * _LENGTH_BYTES
    return config.num_ids * block_bytes


def snapshot_frames(snapshot: StateSnapshot) -> Iterator[bytes]:
    """Yields the frames of a snapshot. Time per frame: of one slice, or of everything that is in no column."""
    payload, columns = encode_apart(StateSnapshot, snapshot)
    checksum = crc32(payload)
    yield encode_frame(FrameKind.SNAPSHOT, payload)
    for number, column in enumerate(columns):
        for piece in column.slices():
            payload = dumps([number, piece])
            checksum = crc32(payload, checksum)
            yield encode_frame(FrameKind.SLICE, payload)
    yield encode_frame(FrameKind.END, dumps(checksum))


def load_snapshot(state: State, frames: Iterator[Frame]) -> None:
    """Restores the state of a snapshot in an empty state, in which the leases are held.

    Args:
        state: The empty state. After an error it is not to be used.
        frames: The frames of the snapshot, and no others.

    Raises:
        DamageError: The frames are not a complete snapshot of this version, or its state is impossible.
    """
    snapshot = _decoded(frames)
    try:
        state.restore(snapshot)
    except (*MALFORMED, KvpoolError) as error:
        raise DamageError(f"is of an impossible state: {error}") from error
    hold_leases(state)


def _decoded(frames: Iterator[Frame]) -> StateSnapshot:
    frame = next(frames, None)
    if frame is None or frame.kind is not FrameKind.SNAPSHOT:
        raise DamageError("does not begin with a snapshot")
    payload, checksum = frame.payload, crc32(frame.payload)
    columns: defaultdict[int, list[object]] = defaultdict(list)
    while (frame := next(frames, None)) and frame.kind is FrameKind.SLICE:
        checksum = crc32(frame.payload, checksum)
        try:
            number, values = loads(frame.payload)
            columns[number] += values_of_slice(values)
        except MALFORMED as error:
            raise DamageError("has a malformed slice") from error
    if frame is None or frame.kind is not FrameKind.END or frame.payload != dumps(checksum) or next(frames, None):
        raise DamageError("is not a whole snapshot")
    return decode(StateSnapshot, payload, columns)
