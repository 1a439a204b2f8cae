"""A spare: waits until a shard of the cluster has too few standbys, and adopts it.

1. A spare has no state. It watches the records of all shards, writes none, and asks one primary at a time.
2. It adopts a shard by writing its identity into the folder of its journal. Its process then starts again as a server
   of that shard, and so does each later one, until the shard has released it.
3. When it has left, the journal is deleted, and the identity last: a server that is killed meanwhile leaves again.
"""

import asyncio
import logging
import random
import ssl
import time
from pathlib import Path
from typing import Final

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.server.cluster.cluster_view import ClusterView
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Directory, Member, ShardName, ShardRecord
from kvpool.server.cluster.follower import CONNECT_SECONDS
from kvpool.server.cluster.identity import Identity, delete_identity, write_identity
from kvpool.server.cluster.messages import (
    ENOUGH_STANDBYS,
    VERSION,
    Hello,
    Refused,
    Welcome,
    answer_of,
    core_fingerprint,
    to_frame,
)
from kvpool.server.cluster.replica import NOTHING
from kvpool.server.cluster.shard_choice import ShardChoice
from kvpool.server.journal.folder import Folder
from kvpool.server.journal.folder import Identity as Writer
from kvpool.server.journal.frames import DamageError, FrameParser
from kvpool.wire.address import host_and_port

POLL_SECONDS: Final = (1.0, 2.0)
"""Bounds of the interval at which a primary is asked at most. It is random, so that spares do not ask together."""
_MAX_ANSWER_BYTES: Final = 16 * 1024

_log = logging.getLogger("kvpool.server.cluster")


class Spare:
    """A spare that waits for a shard.

    Args:
        config: The settings.
        view: The shards of the cluster. The caller lets it follow the directory.
        directory: The directory.
        me: This server, as it joins a shard.
        folder: Folder of its journal, which it locks.
        tls: TLS of the connection to a primary; None for plaintext.

    Attributes:
        cluster: Name of the cluster.
        view: The shards of the cluster.
        directory: The directory.

    Raises:
        OSError: The folder cannot be used, another server uses it, or it has a journal.
    """

    def __init__(  # noqa: PLR0913 - the parts that it connects
        self,
        config: ClusterConfig,
        view: ClusterView,
        directory: Directory,
        me: Member,
        folder: Path,
        *,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.cluster = config.etcd.cluster
        self.view = view
        self.directory = directory
        self._me = me
        self._config = config
        self._tls = tls
        self._choice = ShardChoice(config.zone, config.adopt_seconds, random.SystemRandom())
        self._failure = ""
        self._logged_error = ""
        self._folder = Folder(folder, Writer.of_this_process())
        if self._folder.logs() or self._folder.snapshots() or (folder / "pools").exists():
            self._folder.close()
            raise OSError(f"journal: {folder} has the journal of a server without a shard, and a spare needs its own")

    async def adopt(self) -> None:
        """Waits until a primary wants this spare, and writes the identity of a server of its shard."""
        while True:
            await asyncio.sleep(random.uniform(*POLL_SECONDS))  # noqa: S311 - no secret
            self._log_directory()
            self._choice.saw(self.view.shards, time.monotonic())
            chosen = self._choice.choose(time.monotonic())
            if chosen is None or self.view.error:
                continue
            name, record = chosen
            if await self._is_wanted(name, record) and self._adopts(name, record):
                return
            self._choice.refused(name, time.monotonic())

    async def close(self) -> None:
        """Unlocks the folder, and ends the connection to the directory."""
        self._folder.close()
        await self.directory.close()

    def _adopts(self, name: ShardName, record: ShardRecord) -> bool:
        """Writes the identity; whether that succeeded."""
        identity = Identity(f"{self.cluster}/{name}", self._me.member_id, record.term)
        try:
            write_identity(self._folder.path, identity)
        except OSError as error:
            self._note(name, str(error))
            return False
        _log.warning("shard adopted", extra={"shard": identity.shard, "term": identity.known_term})
        return True

    def _log_directory(self) -> None:
        """Logs that the directory cannot be used, or works again."""
        before, self._logged_error = self._logged_error, self.view.error
        if self.view.error and not before:
            _log.error("directory cannot be used", extra={"shard": f"{self.cluster}/", "error": self.view.error})
        elif before and not self.view.error:
            _log.warning("directory works again", extra={"shard": f"{self.cluster}/"})

    async def _is_wanted(self, name: ShardName, record: ShardRecord) -> bool:
        """Asks the primary of a shard. A failure means no, and is logged if it is new."""
        try:
            hello = self._hello(name, record)
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                answer = await _ask(record.primary_member, hello, self._tls)
        except (OSError, ValueError, DamageError, KvpoolError) as error:
            self._note(name, f"{type(error).__name__}: {error}")
            return False
        if isinstance(answer, Refused) and answer.reason != ENOUGH_STANDBYS:
            self._note(name, f"{answer.reason}: {answer.message}")
        return isinstance(answer, Welcome)

    def _hello(self, name: ShardName, record: ShardRecord) -> Hello:
        shard, token = f"{self.cluster}/{name}", self._config.replication_token()
        return Hello(
            VERSION, shard, core_fingerprint(), token, self._me, record.term, 0, NOTHING, is_spare=True, asks=True
        )

    def _note(self, name: ShardName, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            _log.warning("shard not adopted", extra={"shard": f"{self.cluster}/{name}", "error": failure})


async def _ask(primary: Member, hello: Hello, tls: ssl.SSLContext | None) -> Welcome | Refused:
    host, port = host_and_port("replication_address", primary.replication_address)
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write(to_frame(hello))
        parser = FrameParser(_MAX_ANSWER_BYTES)
        while received := await reader.read(_MAX_ANSWER_BYTES):
            for frame in parser.feed(received):
                return answer_of(frame.kind, frame.payload)
    finally:
        writer.transport.abort()
    raise UnavailableError("NO_ANSWER", "the primary ended the connection")


def forget_shard(path: Path) -> None:
    """Deletes the journal and the identity of a server that has left its shard.

    Raises:
        OSError: The folder cannot be used, or another server uses it.
    """
    folder = Folder(path, Writer.of_this_process())
    try:
        folder.invalidate()
        (path / "pools").unlink(missing_ok=True)
        delete_identity(path)
    finally:
        folder.close()
