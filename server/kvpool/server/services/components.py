"""The parts of one server that its services share, without gRPC."""

import secrets
from typing import TYPE_CHECKING

from kvpool.core.commands import RenewLeases
from kvpool.core.state import State
from kvpool.core.views.event_log import KEPT_BYTES
from kvpool.server.config import ServerConfig
from kvpool.server.events.log import EventLogs
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.limits.fair_turns import FairTurns
from kvpool.server.services.calls import Calls
from kvpool.server.services.clock import ServerClock
from kvpool.server.services.executor import CommandRecorder, Executor
from kvpool.server.services.pools import Pools
from kvpool.server.services.process_watch import ProcessWatch
from kvpool.server.services.ranks import Ranks
from kvpool.server.services.sessions import Sessions
from kvpool.server.shutdown import Shutdown
from kvpool.v1.allocator_pb2 import StepListener

if TYPE_CHECKING:
    from kvpool.server.tracing import Tracer


class Components:
    """The parts of one server, for its services.

    Args:
        config: The server's settings.
        state: Pools and sessions recovered from a journal; None to start with none.
        journal: Records the commands; None for none.
        faults: Fault points; tests arm them.
        clock: The clock of leases and heartbeats; None for a new one.

    Attributes:
        journal: The journal; None for none.
        boot_id: Random id of this server process.
        tracer: Traces admissions and calls; None unless configured.
        turns: Order in which sessions change pools.
        step_listener: Tells clients where the server takes steps as frames.
    """

    def __init__(
        self,
        config: ServerConfig,
        state: State | None = None,
        journal: CommandRecorder | None = None,
        faults: FaultPoints = NO_FAULTS,
        clock: ServerClock | None = None,
    ) -> None:
        self.state = state or State()
        self.clock = clock or ServerClock()
        self.config = config
        self.faults = faults
        self.journal = journal
        self.boot_id = secrets.token_hex(8)
        self.tracer = _tracer(config)
        self.step_listener = StepListener()
        kept_bytes = min(KEPT_BYTES, config.limits.max_event_bytes // config.max_pools)
        self.event_logs = EventLogs(kept_bytes)
        self.turns = FairTurns(config.limits.max_waiting_steps, config.limits.max_waiting_bytes)
        self.shutdown = Shutdown(lambda: len(self.state.sessions))
        self.processes = ProcessWatch(lambda gone: self.sessions.end_gone(gone))  # noqa: PLW0108 - `sessions` follow
        self.calls = Calls(self.shutdown, self.processes.forget)
        self.executor = Executor(self.state, self.clock, journal, self.event_logs, self.calls)
        self.sessions = Sessions(self.executor, self.calls, self.shutdown, faults, config)
        self.pools = Pools(self.executor, self.event_logs, self.shutdown, faults, config)
        self.ranks = Ranks(self.executor, self.pools, faults, config)

    def restore(self, *, expects_ranks: bool = False) -> None:
        """Prepares the pools and sessions of an earlier server; see `Ranks.restore`."""
        self.sessions.await_lost_steps()
        self.executor.execute(RenewLeases())  # recovered sessions get full leases
        for pool in self.state.pools:
            self.executor.open_log(pool)
        self.ranks.restore(expects_ranks=expects_ranks)


def _tracer(config: ServerConfig) -> "Tracer | None":
    if not config.tracing.endpoint:
        return None
    from kvpool.server.tracing import Tracer  # noqa: PLC0415 - needs the packages of an extra

    return Tracer(config.tracing)
