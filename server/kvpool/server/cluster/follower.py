"""The standby's side of replication: executes the primary's records, and acknowledges them.

1. A record is executed, then written to the journal, then acknowledged.
2. A snapshot is loaded beside the state, and replaces it as a whole. It is acknowledged when the journal has it too.
3. A record with another result than at the primary shows that the states differ. The follower then has no state.
4. Nothing is acknowledged unless the replica permits it (`Replica`, I4), or after the connection was left.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from kvpool.core.commands import Command
from kvpool.core.errors import KvpoolError
from kvpool.core.state import State
from kvpool.server.cluster.directory import Member
from kvpool.server.cluster.messages import (
    VERSION,
    Hello,
    Refused,
    acknowledgement,
    answer_of,
    core_fingerprint,
    to_frame,
)
from kvpool.server.cluster.replica import NOTHING, Replica
from kvpool.server.codec import DamageError
from kvpool.server.journal.frames import Frame, FrameKind, FrameParser
from kvpool.server.journal.records import MismatchError, execute_record
from kvpool.server.journal.snapshot import load_snapshot
from kvpool.wire.address import host_and_port

CONNECT_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.2
STALL_SECONDS: Final = 10.0
"""Maximum silence of a primary before it sends records: it may write a snapshot of its own first."""
_SNAPSHOT_KINDS: Final = (FrameKind.SNAPSHOT, FrameKind.SLICE, FrameKind.END)

_log = logging.getLogger("kvpool.server.cluster")


class FollowerJournal(Protocol):
    """The journal of a follower.

    Attributes:
        is_behind: Whether it will have the state, and does not yet.
    """

    is_behind: bool

    def write(self, frame: bytes, command: Command[Any]) -> None:
        """Writes the record of a command that was executed, as it was received."""

    def restart(self) -> None:
        """Begins again, after the state was replaced."""


class Follower:
    """Follows one primary after the other.

    Args:
        replica: Decides whether this server may acknowledge.
        state: The state, which follows the primary's.
        make_state: Makes an empty state.
        journal: Keeps the records.
        me: This server.
        shard: `CLUSTER/SHARD`.
        token: Returns the token for the primary; empty for none. May raise OSError.
        tls: TLS of the connection; None for plaintext.
        lost: Called when the connection has ended, or could not be made.
        state_lost: Called when the state differs from the primary's.
        failed_halfway: Called, to end the process, when a record was executed in part: this state must not take over.
        now_seconds: The monotonic time.

    Attributes:
        resumed_term: Term of the state; 0 if it needs a snapshot.
        position: Last executed position in that term.
        primary_seconds: Time of the newest change, on the clock of the primary's server.
        num_differences: How often the state differed from the primary's.
    """

    def __init__(  # noqa: PLR0913 - the parts that it connects
        self,
        replica: Replica,
        state: State,
        make_state: Callable[[], State],
        journal: FollowerJournal,
        me: Member,
        *,
        shard: str,
        token: Callable[[], str],
        tls: ssl.SSLContext | None,
        lost: Callable[[], None],
        state_lost: Callable[[], None],
        failed_halfway: Callable[[], None],
        now_seconds: Callable[[], float],
    ) -> None:
        self.replica = replica
        self.state = state
        self.make_state = make_state
        self.journal = journal
        self.now_seconds = now_seconds
        self.state_lost = state_lost
        self.failed_halfway = failed_halfway
        self.resumed_term = 0
        self.position = NOTHING
        self.primary_seconds = 0.0
        self.num_differences = 0
        self._me = me
        self._shard = shard
        self._token = token
        self._tls = tls
        self._lost = lost
        self._task: asyncio.Task[None] | None = None
        self._link: _PrimaryLink | None = None
        self._followed: tuple[int, Member] | None = None
        self._failure = ""

    def __repr__(self) -> str:
        return f"<Follower: term {self.resumed_term}, position {self.position}>"

    def is_primary_silent(self, takeover_seconds: float) -> bool:
        """Whether the primary has sent nothing for too long; before it sends records, for `STALL_SECONDS`."""
        link = self._link
        if link is None:
            return False
        limit_seconds = takeover_seconds if link.is_following else STALL_SECONDS
        return self.now_seconds() - link.heard_seconds > limit_seconds

    def follow(self, term: int, primary: Member) -> None:
        """Follows a primary, unless it is followed already."""
        if self._followed == (term, primary):
            return
        delay_seconds = RETRY_SECONDS if self._followed is None and self._task else 0.0
        self.leave()
        self._followed = term, primary
        self._task = asyncio.create_task(self._connect(term, primary, delay_seconds), name="follow")

    def leave(self) -> None:
        """Ends the connection. Nothing is executed or acknowledged any more."""
        if self._task:
            self._task.cancel()
        if self._link:
            self._link.leave()
        self._link, self._followed = None, None

    def hello(self, term: int) -> Hello:
        """The first message in a term.

        Raises:
            OSError: The token cannot be read.
        """
        token = self._token()
        core, position = core_fingerprint(), self.position
        return Hello(VERSION, self._shard, core, token, self._me, term, self.resumed_term, position)

    def ended(self, link: "_PrimaryLink") -> None:
        """Takes the end of a connection."""
        if link.is_following:
            _log.warning("primary lost", extra={"term": self.resumed_term})
        if link is self._link:
            self._link, self._followed = None, None
            self._lost()

    def welcomed(self) -> None:
        """Notes that the primary accepted this server."""
        self._failure = ""
        self.replica.followed()

    def is_new_failure(self, text: str) -> bool:
        """Whether an attempt failed in another way than the one before, and should be logged."""
        before, self._failure = self._failure, text
        return text != before

    async def _connect(self, term: int, primary: Member, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        try:
            host, port = host_and_port("replication_address", primary.replication_address)
            hello = to_frame(self.hello(term))
            async with asyncio.timeout(CONNECT_SECONDS):
                _, link = await asyncio.get_running_loop().create_connection(
                    partial(_PrimaryLink, self, term, hello), host, port, ssl=self._tls
                )
        except (OSError, ValueError) as error:  # UnicodeError of a name or a token is a ValueError
            if self.is_new_failure(f"{primary.replication_address}: {error}"):
                _log.warning("primary not reached", extra={"address": primary.replication_address, "error": str(error)})
            self._followed = None
            self._lost()
            return
        self._link = link
        if link.is_left:  # it ended meanwhile
            self.ended(link)


class _PrimaryLink(asyncio.Protocol):
    """A connection to the primary of a term.

    Attributes:
        is_following: Whether the primary sends records, and its silence means something.
        heard_seconds: When the primary was heard last.
        is_left: Whether the connection has ended, so that nothing is executed.
    """

    def __init__(self, follower: Follower, term: int, hello: bytes) -> None:
        self.is_following = False
        self.heard_seconds = follower.now_seconds()
        self._follower = follower
        self._term = term
        self._hello = hello
        self._transport: asyncio.Transport | None = None
        self._parser = FrameParser()
        self.is_welcome = False
        self._position = NOTHING
        self._snapshot: list[Frame] = []
        self._later: list[bytes] = []  # received while a snapshot is loaded
        self._loading: asyncio.Task[None] | None = None
        self.is_left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends HELLO."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        transport.write(self._hello)

    def data_received(self, received: bytes) -> None:
        """Executes the frames of the primary."""
        self.heard_seconds = self._follower.now_seconds()
        if self.is_left:
            return
        if self._loading:
            self._later.append(received)
            return
        try:
            before = self._position
            for frame in self._parser.feed(received):
                self._handle(frame)
                if self._loading:
                    break  # the parser keeps the frames after it
        except DamageError as error:
            _log.error("primary not understood", extra={"error": str(error)})
            self.leave()
            return
        except (MismatchError, KvpoolError) as error:
            _log.critical("state differs from the primary's", extra={"error": f"{type(error).__name__}: {error}"})
            self.leave()
            self._follower.resumed_term = 0
            self._follower.num_differences += 1
            self._follower.state_lost()
            return
        if self._position != before and self.is_following:
            self._acknowledge()

    def connection_lost(self, _: Exception | None) -> None:
        """Reports the end."""
        self.is_left = True
        if self._loading:
            self._loading.cancel()
        self._follower.ended(self)

    def leave(self) -> None:
        """Ends the connection."""
        self.is_left = True
        if self._transport:
            self._transport.abort()

    def _handle(self, frame: Frame) -> None:
        if not self.is_welcome:
            self._welcomed(frame)
        elif frame.kind is FrameKind.RECORD and not self._snapshot:
            self._execute(frame)
            self._advance()
        elif frame.kind is FrameKind.MARK and not self._snapshot:
            self._advance()
        elif frame.kind in _SNAPSHOT_KINDS and not self.is_following:
            self._snapshot.append(frame)
            if frame.kind is FrameKind.END:
                self._loading = asyncio.create_task(self._load(), name="load_snapshot")
        else:
            raise DamageError(f"a {frame.kind.name} in the wrong place")

    def _execute(self, frame: Frame) -> None:
        follower = self._follower
        try:
            record = execute_record(follower.state, frame.payload)
            follower.journal.write(frame.encoded, record.command)
        except (DamageError, MismatchError, KvpoolError):
            raise
        except BaseException:
            follower.failed_halfway()
            raise
        follower.primary_seconds = record.now_seconds

    def _welcomed(self, frame: Frame) -> None:
        answer = answer_of(frame.kind, frame.payload)
        if isinstance(answer, Refused):
            if self._follower.is_new_failure(answer.message):
                _log.warning("refused by the primary", extra={"reason": answer.reason, "error": answer.message})
            self.leave()
            return
        self.is_welcome = True
        self._follower.welcomed()
        self._position = answer.position
        self.is_following = answer.resumes
        self._follower.primary_seconds = answer.now_seconds

    def _advance(self) -> None:
        self._position += 1
        self._follower.position = self._position

    def _acknowledge(self) -> None:
        follower = self._follower
        if self._transport and not self.is_left and follower.replica.may_acknowledge and not follower.journal.is_behind:
            self._transport.write(acknowledgement(self._position))

    async def _load(self) -> None:
        follower = self._follower
        frames, self._snapshot = iter(self._snapshot), []
        try:
            loaded = follower.make_state()
            await asyncio.to_thread(load_snapshot, loaded, frames)
        except DamageError as error:
            _log.error("snapshot not understood", extra={"error": str(error)})
            self.leave()
            return
        except Exception:  # noqa: BLE001 - it has changed nothing
            _log.exception("bug", extra={"method": "load_snapshot"})
            self.leave()
            return
        if self.is_left:
            return
        follower.state.replace(loaded)
        follower.resumed_term, follower.position = self._term, self._position
        follower.journal.restart()
        follower.replica.snapshot_loaded()
        self.is_following, self._loading = True, None
        for received in (b"", *self._later):  # first what the parser has kept
            self.data_received(received)
        self._later.clear()
        _log.info(
            "snapshot loaded", extra={"pools": len(follower.state.pools), "sessions": len(follower.state.sessions)}
        )
