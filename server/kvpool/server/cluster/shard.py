"""A server of a shard: carries out what its replica decides."""

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from kvpool.core.errors import NotPrimaryError, UnavailableError
from kvpool.core.state import State
from kvpool.server.cluster.admission import Admission
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import (
    Directory,
    Member,
    ShardName,
)
from kvpool.server.cluster.follower import Follower
from kvpool.server.cluster.gate import Gate
from kvpool.server.cluster.hand_overs import HandOvers
from kvpool.server.cluster.identity import IdentityFile
from kvpool.server.cluster.messages import Hello
from kvpool.server.cluster.recorder import Recorder
from kvpool.server.cluster.replica import (
    BecomePrimary,
    BeDeposed,
    Effect,
    Follow,
    ReadDirectory,
    Replica,
    Role,
    SendSwap,
)
from kvpool.server.cluster.shard_entry import ShardEntry
from kvpool.server.cluster.shipper import Shipper
from kvpool.server.cluster.standbys import Standbys
from kvpool.server.journal.journal import Journal
from kvpool.wire.address import host_and_port

EPOCHS_PER_TERM: Final = 2**20
"""A pool that is made in a later term begins with a higher epoch, also if the state of earlier terms is lost."""
BEAT_SECONDS: Final = 0.1
"""Interval of marks while a primary sends no records, and of the look for silent and late servers."""
_LATE_SECONDS: Final = 0.05
"""Time in which a server that was paused handles what has arrived meanwhile."""

_log = logging.getLogger("kvpool.server.cluster")


class Shard:
    """One server's part in its shard.

    Args:
        config: The settings.
        directory: The directory.
        identity: What this server remembers of its shard.
        journal: The journal, recovered, whose state is replicated.
        make_state: Makes an empty state.
        state_seconds: The time on the clock of this server's leases.
        addresses: Addresses at which clients reach this server.
        server_tls: TLS for the connections of standbys; None for plaintext.
        client_tls: TLS for the connection to a primary; None for plaintext.
        check_token: Raises a KvpoolError unless a standby may have the state; None without tokens.
        on_primary: Begins to serve; gets the term, and whether the state of earlier terms is lost.
        on_deposed: Ends this server.

    Attributes:
        name: `CLUSTER/SHARD`.
        shard: `SHARD`.
        directory: The directory.
        replica: The role.
        gate: Holds answers back.
        recorder: Records commands.
        standbys: Its standbys, as the primary.
        admission: The standbys that it accepts, as the primary.
        hand_overs: Makes a standby the primary.
        num_takeovers: How often this process has become the primary.
        entry: The shard's entry in the directory.
    """

    def __init__(  # noqa: PLR0913 - the parts that it connects
        self,
        config: ClusterConfig,
        directory: Directory,
        identity: IdentityFile,
        journal: Journal,
        make_state: Callable[[], State],
        *,
        state_seconds: Callable[[], float],
        addresses: tuple[str, ...],
        server_tls: ssl.SSLContext | None,
        client_tls: ssl.SSLContext | None,
        check_token: Callable[[str], None] | None,
        on_primary: Callable[[int, bool], None],
        on_deposed: Callable[[NotPrimaryError], None],
    ) -> None:
        self._config = config
        self.directory = directory
        self.name = identity.identity.shard
        self.shard = ShardName(self.name.partition("/")[2])
        self._identity = identity
        self._journal = journal
        self._make_state = make_state
        self._on_primary = on_primary
        self._on_deposed = on_deposed
        self._server_tls = server_tls
        replication_address = config.replication_advertise or config.replication_listen
        self.me = Member(identity.identity.member_id, addresses, replication_address, config.zone)
        has_state = bool(journal.recovery.last_number) and not journal.recovery.dropped
        self.replica = Replica(
            self.me,
            has_state=has_state,
            known_term=identity.identity.known_term,
            claimed_term=config.claim_term,
            min_in_sync=config.min_in_sync,
            new_id=lambda: secrets.token_hex(8),
        )
        self.shipper = Shipper(
            self.replica,
            journal.state,
            journal.snapshot_lock,
            check=self._check_hello,
            carry_out=self._carry_out,
            max_log_bytes=config.replication_log_bytes,
            now_seconds=time.monotonic,
            state_seconds=state_seconds,
        )
        self.gate = Gate(self.replica, self.shipper.mark, config.confirm_seconds)
        self.recorder = Recorder(journal, self.shipper)
        self.follower = Follower(
            self.replica,
            journal.state,
            make_state,
            journal,
            self.me,
            shard=self.name,
            token=config.replication_token,
            tls=client_tls,
            lost=self._stream_lost,
            state_lost=self._state_lost,
            failed_halfway=self.recorder.give_up_after_bug,
            now_seconds=time.monotonic,
        )
        self.standbys = Standbys(config, self.replica, self.shipper)
        self.admission = Admission(
            self.name,
            self.replica,
            self.shipper,
            self.me.member_id,
            check_token=check_token,
            not_primary=self.not_primary,
        )
        self.hand_overs = HandOvers(
            self.name,
            self.replica,
            self.shipper,
            self.admission,
            carry_out=self._carry_out,
            wait_changed=self._wait_changed,
        )
        self.entry = ShardEntry(directory, self.shard, self.name, self.replica, self._carry_out)
        self.num_takeovers = 0
        self.changed = asyncio.Event()
        """Set, and replaced, with each change of the role, of the entry, and of the connected standbys."""
        self._shown = self._to_show()
        self._tasks: set[asyncio.Task[None]] = set()
        self._became_primary_seconds = 0.0

    def __repr__(self) -> str:
        return f"<Shard {self.name}: {self.replica}>"

    async def listen(self) -> None:
        """Opens the address for standbys.

        Raises:
            OSError: It cannot be bound.
        """
        host, port = host_and_port("replication_listen", self._config.replication_listen)
        try:
            await self.shipper.listen(host, port, self._server_tls)
        except OSError as error:
            raise OSError(f"replication_listen: cannot listen on {self._config.replication_listen}") from error

    def start(self) -> None:
        """Joins the shard."""
        self._start(self.entry.watch(), "watch_directory")
        self._start(self._beat(), "beat")

    async def stop(self) -> None:
        """Leaves the shard without a word, as if the process had died."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.follower.leave()
        await self.shipper.close()
        await self.directory.close()

    def refusal(self) -> NotPrimaryError | None:
        """The error for calls while this server is not the primary; None while it is."""
        return None if self.replica.role is Role.PRIMARY else self.not_primary()

    async def confirmed(self) -> None:
        """Waits until the standbys have every change so far, or indefinitely if this server is deposed."""
        while True:
            try:
                await self.gate.wait(None)
            except NotPrimaryError:
                await asyncio.Event().wait()
            except UnavailableError:  # not in time: this message has all the time
                continue
            return

    def not_primary(self) -> NotPrimaryError:
        """The error that names the primary, as far as it is known."""
        record = self.replica.entry.record
        primary = record.primary_member if record else None
        is_other = primary is not None and primary.member_id != self.me.member_id
        return NotPrimaryError(primary.addresses if primary and is_other else (), self.replica.known_term)

    @property
    def is_following(self) -> bool:
        """Whether this server could take over: it follows the primary, and is in sync."""
        return self.replica.role is Role.STANDBY and any(member == self.me for member in self.replica.in_sync)

    # What the replica decides

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendSwap():
                    if self.replica.role is not Role.PRIMARY:
                        self.follower.leave()  # before it is sent: nothing is acknowledged any more
                    self._start(self.entry.swap(effect), "swap")
                case ReadDirectory():
                    self._start(self.entry.read(), "read_directory")
                case Follow(term, primary):
                    self.follower.follow(term, primary)
                case BecomePrimary(term, is_state_lost):
                    self._become_primary(term, is_state_lost=is_state_lost)
                case BeDeposed():
                    self._be_deposed()
        self.gate.release()
        shown = self._to_show()
        if shown != self._shown:
            self._shown = shown
            self.changed.set()
            self.changed = asyncio.Event()

    async def _wait_changed(self) -> None:
        await self.changed.wait()

    def _to_show(self) -> object:
        return self.replica.role, self.replica.entry, tuple(self.shipper.links)

    def _become_primary(self, term: int, *, is_state_lost: bool) -> None:
        self.follower.leave()
        self.shipper.begin()
        self._identity.keep_term(term)
        self.num_takeovers += 1
        self._became_primary_seconds = time.monotonic()
        _log.warning("became primary", extra={"shard": self.name, "term": term, "state_lost": is_state_lost})
        self._on_primary(term, is_state_lost)

    def _be_deposed(self) -> None:
        error = self.not_primary()
        _log.warning("deposed", extra={"shard": self.name, "term": error.term, "primary": error.addresses})
        self.gate.close(error)
        for link in list(self.shipper.links.values()):
            link.abort()
        self._on_deposed(error)

    def _stream_lost(self) -> None:
        self._carry_out(self.replica.stream_lost())

    def _state_lost(self) -> None:
        state = self._journal.state
        state.replace(self._make_state())
        self._journal.restart()
        self._carry_out(self.replica.state_lost())

    # Silence

    async def _beat(self) -> None:
        """Sends marks, and looks for silent and late servers, indefinitely.

        After a pause of this process, what has arrived is handled before a server counts as silent or late.
        """
        position = self.shipper.log.last_position
        beat_seconds = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._identity.keep_term(self.replica.known_term)
            was_late = time.monotonic() - beat_seconds > 2 * BEAT_SECONDS
            beat_seconds = time.monotonic()
            if self.replica.role is Role.PRIMARY:
                if self.shipper.log.last_position == position:
                    self.shipper.mark()
                self.shipper.measure_lags()
                position = self.shipper.log.last_position
            if was_late:
                await asyncio.sleep(_LATE_SECONDS)
            self._look_for_silence(time.monotonic())

    def _look_for_silence(self, now_seconds: float) -> None:
        if self.follower.is_primary_silent(self._config.takeover_seconds):
            _log.warning("primary silent", extra={"shard": self.name, "seconds": self._config.takeover_seconds})
            self.follower.leave()
            self._carry_out(self.replica.stream_lost())
        if self.replica.role is not Role.PRIMARY:
            return
        self._carry_out(self.standbys.dismiss_late(now_seconds))
        if now_seconds - self._became_primary_seconds > self._config.standby_timeout_seconds:
            for member_id in sorted(self.replica.awaited - self.shipper.links.keys()):
                self._carry_out(self.replica.follower_lost(member_id))

    def _check_hello(self, hello: Hello) -> None:
        self.admission.check(hello)

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.critical("bug: the server restarts", extra={"method": task.get_name()}, exc_info=error)
            self._be_deposed()
