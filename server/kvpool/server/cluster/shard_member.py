"""A server's part in its shard: the driver of its replica, and what carries out what the replica decides.

There is one loop (`_run`) over one queue. It gives the replica an event, then persists, sends and answers what is
ready, then takes the next event. An event that arrives while something is carried out waits in the queue.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from kvpool.core.errors import NotPrimaryError
from kvpool.server.cluster import effects, events
from kvpool.server.cluster.directory import Directory, Seen
from kvpool.server.cluster.directory_client import DirectoryClient
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.gate import Gate
from kvpool.server.cluster.hand_overs import HandOvers
from kvpool.server.cluster.identity import IdentityFile
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.recorder import Recorder
from kvpool.server.cluster.replica import Replica
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.replication_client import ReplicationClient
from kvpool.server.cluster.replicator import Replicator
from kvpool.server.cluster.standby_check import StandbyCheck

EPOCHS_PER_TERM: Final = 2**20
"""A pool that is made in a later term begins with a higher epoch, also if the state of earlier terms is lost."""
BEAT_SECONDS: Final = 0.1
"""Interval of marks while a primary sends no records, and of ticks."""
_LATE_SECONDS: Final = 0.05
"""Time in which a server that was paused handles what has arrived meanwhile."""

_log = logging.getLogger("kvpool.server.cluster")


class ShardServer(Protocol):
    """The server around a member."""

    def become_primary(self, term: int, *, is_state_lost: bool) -> None:
        """Begins to serve; the state of earlier terms may be lost."""

    def be_deposed(self, error: NotPrimaryError) -> None:
        """Ends its calls with an error, then itself."""


class ShardMember:
    """One server's part in its shard.

    Args:
        settings: The settings.
        directory: The directory.
        identity: What this server remembers of its shard.
        state: The state that is replicated.
        server: The server around it.

    Attributes:
        name: Name of the shard.
        me: This server.
        directory: The directory.
        state: The state.
        replica: The role.
        changed: Set, and replaced, with each change of the role, of the entry, and of the connected standbys.
        directory_client: Calls the directory.
        check: The standbys that it accepts, as the primary.
        replicator: Sends records, as the primary.
        client: Follows the primary, as a standby.
        gate: Holds answers back.
        recorder: Records commands.
        hand_overs: Makes a standby the primary.
        num_takeovers: Number of times that this process has become the primary.
    """

    def __init__(
        self,
        settings: MemberSettings,
        directory: Directory,
        identity: IdentityFile,
        state: ReplicatedState,
        server: ShardServer,
    ) -> None:
        self.name = settings.shard
        self.me = settings.me
        self.directory = directory
        self.state = state
        self.replica = Replica(
            settings.me,
            settings.cluster,
            has_state=state.was_recovered,
            seen=identity.identity.seen,
            new_id=lambda: secrets.token_hex(8),
        )
        self.changed = asyncio.Event()
        self.directory_client = DirectoryClient(self, directory, self.name)
        self.check = StandbyCheck(settings, self.replica)
        self.replicator = Replicator(self, settings, state, self.check)
        self.gate = Gate(self.replica, self.replicator, settings.cluster.confirm_seconds)
        self.recorder = Recorder(state.journal, self.replicator)
        self.client = ReplicationClient(self, settings, state, self.recorder)
        self.hand_overs = HandOvers(self, self.check, self.name)
        self.num_takeovers = 0
        self._settings = settings
        self._identity = identity
        self._server = server
        self._events: deque[events.Event] = deque()
        self._is_running = False
        self._shown: object = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<ShardMember {self.name}: {self.replica}>"

    def start(self) -> None:
        """Joins the shard."""
        self._start(self.directory_client.watch(), "watch_directory")
        self._start(self._beat(), "beat")

    async def stop(self) -> None:
        """Leaves the shard without notice to other servers, as if the process had died."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.client.leave()
        await self.replicator.close()
        await self.directory.close()

    def refusal(self) -> NotPrimaryError | None:
        """The error for calls while this server is not the primary; None while it is."""
        return None if self.replica.role is Role.PRIMARY else self.replica.not_primary_error

    # The driver

    def step(self, event: events.Event) -> None:
        """Gives the replica an event, and carries out what is ready then.

        Raises:
            DirectoryRegressedError: See `Replica.step`.
        """
        if self._is_running:
            self._events.append(event)
        else:
            self.replica.step(event)
            self._run()

    def tick(self) -> None:
        """Gives the replica the time, and carries out what is ready then."""
        self.replica.step(self.client.heard)
        self._keep(self.replica.seen)  # once more if the last attempt failed
        if self._identity.is_lost and self.state.journal.is_complete:  # a member needs the state that it acknowledged
            self._identity.restore()
        self.replica.tick(time.monotonic())
        self._run()

    def _run(self) -> None:
        self._is_running = True
        try:
            self._carry_out(self.replica.ready())
            while self._events:
                self.replica.step(self._events.popleft())
                self._carry_out(self.replica.ready())
        finally:
            self._is_running = False

    def _carry_out(self, ready: effects.Ready) -> None:
        if ready.seen > self._identity.identity.seen:
            self._keep(ready.seen)
        for effect in ready.effects:
            self._effect(effect)
        self.gate.release(ready.confirmed)
        self.replica.advance()
        shown = self.replica.role, self.replica.entry, tuple(self.replica.standbys.connected)
        if shown != self._shown:
            self._shown = shown
            self.changed.set()
            self.changed = asyncio.Event()

    def _keep(self, seen: Seen) -> None:
        if self.state.journal.is_in_place:  # else another server may have taken the folder
            self._identity.keep(seen)

    def _effect(self, effect: effects.Effect) -> None:  # noqa: C901 - a case per effect
        match effect:
            case effects.Acknowledge(position):
                self.client.acknowledge(position)
            case effects.SendSwap():
                self._start(self.directory_client.swap(effect), "swap")
            case effects.ReadDirectory():
                self._start(self.directory_client.read(), "read_directory")
            case effects.Follow(term, primary):
                self.client.follow(term, primary)
            case effects.Leave():
                self.client.leave()
            case effects.BecomePrimary(term, is_state_lost):
                self._become_primary(term, is_state_lost=is_state_lost)
            case effects.BeDeposed():
                self._be_deposed()
            case effects.SendSnapshot(member_id):
                self.replicator.send_snapshot(member_id)
            case effects.EndStandby(member_id):
                self.replicator.end(member_id)
            case effects.ReportSilence():
                seconds = self._settings.cluster.takeover_seconds
                _log.warning("primary silent", extra={"shard": self.name, "seconds": seconds})
            case effects.ReportLate(member_id):
                seconds = self._settings.cluster.standby_timeout_seconds
                _log.warning("standby late", extra={"member": member_id, "seconds": seconds})

    def _become_primary(self, term: int, *, is_state_lost: bool) -> None:
        self.replicator.begin()
        self.num_takeovers += 1
        _log.warning("became primary", extra={"shard": self.name, "term": term, "state_lost": is_state_lost})
        self._server.become_primary(term, is_state_lost=is_state_lost)

    def _be_deposed(self) -> None:
        error = self.replica.not_primary_error
        _log.warning("deposed", extra={"shard": self.name, "term": error.term, "primary": error.addresses})
        self.gate.close(error)
        self.replicator.end_all()
        self._server.be_deposed(error)

    # Tasks

    async def _beat(self) -> None:
        """Sends marks, and gives the replica the time, indefinitely.

        After a pause of this process, what has arrived is handled before a server counts as silent or late.
        """
        beat_seconds = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            was_late = time.monotonic() - beat_seconds > 2 * BEAT_SECONDS
            beat_seconds = time.monotonic()
            if self.replica.role is Role.PRIMARY:
                self.replicator.beat()
            if was_late:
                await asyncio.sleep(_LATE_SECONDS)
            self.tick()

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.critical("bug: the server restarts", extra={"method": task.get_name()}, exc_info=error)
            self._be_deposed()
