"""The file `pools`: the pools and their epochs, for when nothing else of a journal is valid.

1. It is written with fsync, as no log is: it changes with epochs only.
2. It is read only when the log is not valid. Then each pool begins `EPOCH_LEAP` epochs above its listed one, which
   covers the epochs that were not listed.
"""

import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvpool.core.errors import KvpoolError
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.server.codec import DamageError, decode, encode
from kvpool.server.journal.folder import Folder, reading
from kvpool.server.journal.frames import Frame, FrameKind, encode_frame
from kvpool.v1 import pool_pb2
from kvpool.wire.pools import config_from_proto, config_to_proto

EPOCH_LEAP: Final = 1000
"""Number of epochs that may have begun without a record, while the disk was full."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, which do not pass soon."""

_log = logging.getLogger("kvpool.server")


@dataclass(frozen=True, slots=True)
class PastPool:
    """A pool in the list.

    Attributes:
        name: The pool's name; empty in the entry for all removed pools together.
        epoch: The pool's epoch; the highest epoch of all removed pools.
        config: Its configuration as a message of the wire, which later versions can read; empty if ranks form the pool.
    """

    name: str
    epoch: int
    config: bytes = b""

    def decoded_config(self) -> PoolConfig | None:
        """The pool's configuration; None if there is none, or if it is not valid in this version."""
        try:
            config = config_from_proto(pool_pb2.PoolConfig.FromString(self.config))
            config.check()
        except (DecodeError, KvpoolError):
            return None
        return config


class PoolList:
    """Keeps the list of a state's pools.

    Args:
        folder: The folder of the journal.
        state: The state.
    """

    def __init__(self, folder: Folder, state: State) -> None:
        self._folder = folder
        self._state = state
        self._written: list[tuple[str, int]] = []

    def write(self) -> None:
        """Writes the list unless it is written. If that fails, tries once more.

        Raises:
            OSError: It cannot be written.
        """
        pools = self._state.pools
        found = [("", pools.past_epoch), *((pool.config.name, pool.epoch) for pool in pools)]
        if found == self._written:
            return
        try:
            self._replace()
        except OSError as error:
            if error.errno in FULL:
                raise
            _log.warning("journal write repeated", extra={"error": error.strerror or str(error)})
            self._replace()
        self._written = found

    def forget(self) -> None:
        """Lets the next `write` write the list even if it has not changed, as a new journal begins."""
        self._written = []

    def _replace(self) -> None:
        pools, path = self._state.pools, self._folder.path / "pools"
        entries = [PastPool("", pools.past_epoch)]
        for pool in pools:
            is_formed = pool.config.name in pools.rank_groups
            config = b"" if is_formed else config_to_proto(pool.config, with_none_hash=True).SerializeToString()
            entries.append(PastPool(pool.config.name, pool.epoch, config))
        with self._folder.new_file(path) as file:
            file.append(encode_frame(FrameKind.POOLS, encode(list[PastPool], entries)))
            file.sync()
            self._folder.name_part(path)
        self._folder.sync()


def read_pools(folder: Folder) -> list[PastPool] | None:
    """Reads the file; None if it does not exist. If it was never written, the list is empty.

    Raises:
        DamageError: The file is damaged, or has another format.
        OSError: The file cannot be read.
    """
    path = folder.path / "pools"
    try:
        if not path.stat().st_size:
            return []
        with reading(path) as file:
            return decode(list[PastPool], _pools_payload(file.frames))
    except FileNotFoundError:
        return None


def _pools_payload(frames: Iterator[Frame]) -> bytes:
    frame = next(frames, None)
    if frame is None or frame.kind is not FrameKind.POOLS:
        raise DamageError("is incomplete")
    return frame.payload
