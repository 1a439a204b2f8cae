"""Servers of one shard in one event loop, with real sockets and journals, without gRPC."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvpool.core.blocks.free_list import FreeListSnapshot
from kvpool.core.errors import KvpoolError, NotPrimaryError
from kvpool.core.ids import BlockId, GroupId
from kvpool.core.pools.snapshots import PoolSnapshot, StateSnapshot
from kvpool.core.sessions.session import Session
from kvpool.core.snapshots import Column
from kvpool.core.state import State
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Member
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.identity import IdentityFile
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.messages import Welcome, read_welcome
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.journal.frames import Frame, FrameKind, decode_frame
from kvpool.server.journal.snapshot import load_snapshot, snapshot_frames
from kvpool.wire import link
from kvpool.wire.frames import FrameReader
from support import waiting
from support.journal import journal_in, kill
from support.memory_directory import MemoryDirectory, Store
from support.server import free_port
from support.state import DrivenState, driven
from support.waiting import DEADLINE_SECONDS

SHARD = "test"
PATIENT = dict.fromkeys(("takeover_seconds", "standby_timeout_seconds", "confirm_seconds"), 60.0)
"""No server counts as silent because the machine is slow."""

until = waiting.until


class StoppedClock:
    """A clock of leases that stands."""

    def now_seconds(self) -> float:
        """The time."""
        return 0.0


class NoServer:
    """A server that does nothing when its role changes."""

    def become_primary(self, term: int, *, is_state_lost: bool) -> None:
        """See `ShardServer`."""

    def be_deposed(self, error: NotPrimaryError) -> None:
        """See `ShardServer`."""


class ReplicaServer:
    """A server of a shard: what `app.Server` does around it, without services.

    Args:
        folder: The folder of its journal.
        store: The directory's records.
        tokens: See `MemberSettings`.
        server_tls: See `MemberSettings`.
        client_tls: See `MemberSettings`.
        **settings: Settings of the shard.

    Attributes:
        folder: The folder of its journal.
        directory: Its connection to the directory.
        shard: The shard.
        deposed: The error that ended it; None before.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        tokens: Any = None,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        **settings: Any,
    ) -> None:
        address = f"127.0.0.1:{free_port()}"
        settings = {"replication_listen": address, **PATIENT, **settings}
        config = ClusterConfig(url="etcd://127.0.0.1:1/test", **settings)
        self.folder = folder
        self.journal = journal_in(folder)
        self.state.journal = None
        self.directory = MemoryDirectory(store)
        self.deposed: NotPrimaryError | None = None
        identity = IdentityFile(folder, SHARD)
        me = Member(identity.identity.member_id, (f"{folder.name}:1",), config.replication_listen)
        self.shard = ShardMember(
            MemberSettings(config, SHARD, me, server_tls, client_tls, tokens),
            self.directory,
            identity,
            ReplicatedState(self.journal, DrivenState, StoppedClock()),
            self,
        )
        self._writing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return repr(self.shard)

    @property
    def state(self) -> DrivenState:
        """The state."""
        return driven(self.journal)

    @property
    def role(self) -> Role:
        """The role."""
        return self.shard.replica.role

    async def encoded(self) -> bytes:
        """The state; see `encoded`. Waits while the journal, or a standby, reads it."""
        async with self.journal.snapshot_lock:
            return encoded(self.state)

    def has_in_sync(self, count: int) -> bool:
        """Whether it knows this number of in-sync members."""
        return self.num_in_sync() == count

    def is_primary(self) -> bool:
        """Whether it is the primary."""
        return self.role is Role.PRIMARY

    def num_in_sync(self) -> int:
        """Number of in-sync members that this server knows."""
        return len(self.shard.replica.in_sync)

    async def start(self) -> None:
        """Joins the shard."""
        await self.shard.replicator.listen()
        self._writing = asyncio.create_task(self.journal.run())
        self.shard.start()

    async def die(self) -> None:
        """Ends as a killed process does."""
        if self._writing:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
            await self.shard.stop()
            kill(self.journal)

    def become_primary(self, _: int, *, is_state_lost: bool) -> None:
        """See `ShardServer`."""
        self.journal.begin()
        self.state.journal = self.shard.recorder
        if is_state_lost:
            self.state.lose_sessions()
        self.state.renew_leases(0.0)

    def be_deposed(self, error: NotPrimaryError) -> None:
        """See `ShardServer`."""
        self.state.journal = None
        self.deposed = error


@contextlib.asynccontextmanager
async def servers_of_a_shard(
    folder: Path, count: int, store: Store, **settings: Any
) -> AsyncIterator[list[ReplicaServer]]:
    """Runs servers; the first one is the primary, and the others are in sync."""
    servers = [ReplicaServer(folder / f"s{number}", store, **settings) for number in range(count)]
    try:
        for number, server in enumerate(servers, start=1):
            await server.start()
            await until(partial(servers[0].has_in_sync, number))
        yield servers
    finally:
        for server in servers:
            await server.die()


class PlayedStandby:
    """A standby that a test plays, with its connection to a primary."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._link, self._frames = FrameReader(link.client_state()), list[tuple[int, bytes]]()
        self.num_received_bytes = 0

    def send(self, content: bytes) -> None:
        self._writer.write(content)

    async def _next(self) -> tuple[int, bytes]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not self._frames:
                received = await self._reader.read(2**16)
                assert received, "the connection has ended"
                self.num_received_bytes += len(received)
                self._frames += self._link.feed(received)
        return self._frames.pop(0)

    async def answer(self) -> Welcome | KvpoolError:
        """Waits for the answer to a hello, or for a refusal."""
        kind, payload = await self._next()
        return read_welcome(payload) if kind == link.Kind.WELCOME else link.read_refusal(payload)

    async def record(self) -> bytes:
        """Waits for a position; its record, or nothing for a mark."""
        kind, payload = await self._next()
        assert kind == link.Kind.ANSWER
        if not payload:
            return b""
        frame = decode_frame(payload)
        assert frame.kind is FrameKind.RECORD
        return frame.payload

    async def snapshot(self) -> DrivenState:
        frames = list[Frame]()
        while not frames or frames[-1].kind is not FrameKind.END:
            frames.append(decode_frame((await self._next())[1]))
        loaded = DrivenState()
        load_snapshot(loaded, iter(frames))
        return loaded

    async def is_ended(self) -> bool:
        """Waits for the end of the connection; whether nothing else came before it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            try:
                return not self._frames and not await self._reader.read(1)
            except ConnectionResetError:
                return True

    def close(self) -> None:
        self._writer.transport.abort()


def encoded(state: State) -> bytes:
    """The state as the frames of a snapshot, without what a standby has otherwise than its primary."""
    with state.snapshot() as snapshot:
        return b"".join(snapshot_frames(_normalized(snapshot)))


def _normalized(snapshot: StateSnapshot) -> StateSnapshot:
    """Leaves out what begins again in each process: streams, the leases that they and calls renew, orders of sets."""
    return replace(snapshot, pools=[_normalized_pool(pool) for pool in snapshot.pools])


def _normalized_pool(pool: PoolSnapshot) -> PoolSnapshot:
    sessions, ended = list(pool.sessions.values), list(pool.quarantined.values)
    for session in (*sessions, *(each.session for each in ended)):
        _forget_lease(session)
    free_list = _without_skipped(pool.blocks.free_list)
    blocks = replace(pool.blocks, free_list=free_list, evicted_held=sorted(pool.blocks.evicted_held))
    return replace(pool, blocks=blocks, sessions=Column(sessions), quarantined=Column(ended))


def _without_skipped(free_list: FreeListSnapshot) -> FreeListSnapshot:
    """Leaves out the entries of chunks that are to be skipped, as a restored list does."""
    column, entries = list(free_list.column.values), iter(list(free_list.chunk_entries.values))
    lengths, kept = [], list[BlockId]()
    for number, length in free_list.chunk_lengths.values:
        found = [each for each in islice(entries, length) if column[each] == -number] if number else []
        kept += found
        lengths.append((number, len(found) if number else length))
    lengths = [each for each in lengths if each[1]]
    return replace(free_list, column=Column(column), chunk_lengths=Column(lengths), chunk_entries=Column(kept))


def _forget_lease(session: Session) -> None:
    session.open_streams, session.last_seen_seconds = 0, 0.0


def damage(state: State) -> None:
    """Takes a block of a pool, so that later allocations give other blocks."""
    blocks = next(iter(state.pools)).blocks
    assert blocks.get_new_blocks(GroupId(0), 1)
