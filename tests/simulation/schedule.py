"""One schedule: a server or a shard of them, its ranks and schedulers, and their faults, all drawn from one seed."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import NoReturn

from kvpool.core.ranks.messages import RankTiming
from kvpool.core.state import State
from kvpool.server.cluster.directory import ShardRecord
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.shard_member import ShardMember
from simulation.byte_streams import ByteStreams
from simulation.checks import Checks
from simulation.distant_directory import DIRECTORY, DistantDirectory
from simulation.faults import Faults
from simulation.gpu import Violation, layouts
from simulation.grpc_call import Wire
from simulation.network import Network
from simulation.operator_process import Operator
from simulation.rank_lines import RankLines
from simulation.rank_process import RankProcess, RankSettings
from simulation.scheduler_parts import EngineError, SchedulerSettings
from simulation.scheduler_process import SchedulerProcess
from simulation.server_process import ServerProcess, ServerSettings, tear_next_write, write_well
from simulation.stand_ins import host_memory, stand_ins
from simulation.virtual_loop import Killed, Process, VirtualLoop, current_process
from simulation.world import DEAD_PEER_SECONDS, POOL, draw_world
from support.memory_directory import Store

TIMING = RankTiming(heartbeat_seconds=0.25, heartbeat_timeout_seconds=1.0, grace_seconds=2.0)
FAULTS_UNTIL_SECONDS = 6.0
LIMIT_SECONDS = 120.0
"""Virtual time by which all work must be done, long after the last fault has ended."""
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - fsync costs nothing there
MACHINE_SECONDS = 1.0
"""Time until a new machine replaces one that is lost."""
QUIET_SECONDS = 12.0
"""Virtual time after which an ended session has no effect."""


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of a schedule without violations."""

    num_events: int
    num_answers: int
    num_retries: int
    num_faults: int
    num_terms: int
    num_copies_out: int
    num_copies_in: int
    virtual_seconds: float


class Schedule:
    """One schedule.

    Args:
        seed: Decides everything.
        trace: Called with each line of the trace; None for no trace.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = Random(seed)  # noqa: S311 - a simulation
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self.random)
        self.draw = draw_world(self.random)
        self.checks = Checks(
            self.fail,
            self.allocator,
            self._reported_epoch,
            lambda: self.draw.has_journal,
            self._term_of,
            self.trace,
        )
        self.streams = ByteStreams(self.network, self.random)
        self.wire = Wire(self.network, self.random, self.checks)
        self.lines = RankLines(self.network, self.random)
        self.processes: dict[str, Process] = {}
        self.schedulers_left = self.draw.num_schedulers
        self._trace = trace
        self._violations: list[str] = []
        self._servers: dict[Process, ServerProcess] = {}
        self._folder: Path | None = None
        self._store = Store(self._record_written)
        self._claimed_term = 0
        self._without_journal: set[str] = set()
        """Servers that were killed after they had loaded a snapshot, and before their journal had it."""
        self._address = ",".join(self.draw.addresses)
        self._settings = [self._scheduler_settings(i) for i in range(self.draw.num_schedulers)]

    def run(self) -> Report:
        """Runs it.

        Raises:
            Violation: Something was found.
        """
        with (
            tempfile.TemporaryDirectory(dir=_MEMORY) as folder,
            self.loop,
            stand_ins(self.loop, self.random, self.wire, self._new_directory, self._exit),
            host_memory(self.draw.config.num_host_blocks),
        ):
            if self.draw.has_journal:
                self._folder = Path(folder)
            self._start_processes()
            faults = Faults(self, FAULTS_UNTIL_SECONDS)
            faults.start()
            is_done = self.loop.run_until(self._is_over, LIMIT_SECONDS)
            if not is_done and not self._violations:
                self.fail(f"{self.schedulers_left} schedulers have not done their work after {LIMIT_SECONDS:g} s")
            write_well()
            if not self._violations:
                self._wait_until_quiet()
                self._check_end()
            for error in (*self.loop.errors, *self.loop.task_errors()):
                self.fail(error)
            for process, server in self._servers.items():
                if not process.is_dead:
                    server.close_files()
        if self._violations:
            raise Violation(self._violations[0])
        checks, loop = self.checks, self.loop
        return Report(
            loop.num_turns,
            checks.num_answers,
            checks.num_retries,
            faults.num_faults,
            checks.num_terms,
            checks.num_copies_out,
            checks.num_copies_in,
            loop.now_seconds,
        )

    def _start_processes(self) -> None:
        for name in self.draw.servers:
            self.start_server(name)
        for rank in range(self.draw.num_ranks):
            self.start_rank(rank)
        for i in range(self.draw.num_schedulers):
            self.start_scheduler(i)

    def _check_end(self) -> None:
        self.checks.nothing_held()
        if self.draw.is_shard and not self._violations:
            self._check_standbys()

    def _wait_until_quiet(self) -> None:
        """Lets time pass until no block is held, up to the maximum time that this may take."""
        limit_seconds = max(self.loop.now_seconds, FAULTS_UNTIL_SECONDS) + QUIET_SECONDS
        while self.loop.now_seconds < limit_seconds and not self._violations and not self.checks.has_settled():
            look_seconds = self.loop.now_seconds + 0.25
            self.loop.run_until(lambda: bool(self._violations), look_seconds)
            self.loop.now_seconds = look_seconds

    def _check_standbys(self) -> None:
        """Waits until all servers are in sync, and compares their states."""
        shards = {name: self._shard_of(name) for name in self.draw.servers}

        def are_equal() -> bool:
            shards.update((name, self._shard_of(name)) for name in self.draw.servers)
            primary = shards[self.primary_name] if self.primary_name else None
            standbys = [each for each in shards.values() if each and each is not primary]
            return (
                primary is not None
                and len(primary.replica.in_sync) == len(standbys) + 1 == len(shards)
                and all(each.client.position == primary.replicator.log.last_position for each in standbys)
                and not any(each.state.snapshot_lock.locked() for each in (primary, *standbys))
            )

        if not self.loop.run_until(are_equal, self.loop.now_seconds + QUIET_SECONDS):
            self.fail(f"not all servers are in sync {QUIET_SECONDS:g} s after the last fault: {shards}")
            return
        states = {name: shard.state.state for name, shard in shards.items() if shard}
        self.checks.standbys_are_equal(states.pop(self.primary_name), states.values())

    def _shard_of(self, name: str) -> ShardMember | None:
        process = self.processes[name]
        server = None if process.is_dead else self._servers[process].server
        return server.shard if server else None

    def fail(self, what: str) -> None:
        """Records a violation, which ends the schedule."""
        if self.loop.is_closed():
            return  # part of the clean-up
        self.trace("VIOLATION: %s", what)
        self._violations.append(f"at {self.loop.now_seconds:.4f} s: {what}")

    def trace(self, what: str, *args: object) -> None:
        """Writes a line of the trace; arguments are formatted only if there is a trace."""
        if self._trace:
            self._trace(f"{self.loop.now_seconds:9.4f} {what % args if args else what}")

    def allocator(self) -> State | None:
        """The core of the running server, or of the primary, if any."""
        primary = self._primary()
        return primary[1].state if primary else None

    @property
    def primary_name(self) -> str:
        """Name of the primary, or of the only server; empty if there is none."""
        primary = self._primary()
        return primary[0].name if primary else ""

    def _primary(self) -> tuple[Process, ServerProcess] | None:
        """The primary of the newest term, or the only server. A deposed one may not know it yet."""
        found = [each for each in self._servers.items() if not each[0].is_dead and each[1].state]
        return next((each for each in found if each[1].term == self.checks.newest_term), None)

    def _new_directory(self) -> DistantDirectory:
        return DistantDirectory(self.network, self._store)

    def _exit(self, status: int) -> NoReturn:
        """Ends the running process, which is a finding unless it was killed meanwhile."""
        process = current_process()
        if process and not process.is_dead:
            self.fail(f"{process} exits with {status}")
        raise Killed

    def _record_written(self, before: ShardRecord | None, record: ShardRecord) -> None:
        """Checks the servers that a record adds to those in sync."""
        for member in record.in_sync:
            name = member.addresses[0].partition(":")[0]
            shard = self._shard_of(name)
            if shard and before and not before.member(member.member_id):
                if shard.replica.role is Role.STANDBY and not self._servers[self.processes[name]].has_journal:
                    self.fail(f"{name} is added to term {record.term} without a journal")
                self.checks.is_complete(shard.state.state, f"{name} is added to term {record.term}")

    def _term_of(self, process: Process) -> int:
        return self._servers[process].term

    def _reported_epoch(self) -> int:
        """The newest epoch that a living rank knows."""
        return max((rank.last_epoch for process, rank in self.lines.ranks.values() if not process.is_dead), default=0)

    def _is_over(self) -> bool:
        return bool(self._violations) or not self.schedulers_left

    def start_server(self, name: str) -> None:
        """Starts a server process."""
        process = self._new_process(name)

        def became_primary(server: ServerProcess, is_state_lost: bool) -> None:  # noqa: FBT001 - as reported
            if server.state:
                self.checks.became_primary(process, server.term, server.state, is_state_lost=is_state_lost)

        folder = self._folder / name if self._folder else None
        settings = ServerSettings(
            f"{name}:1", TIMING, folder, self.draw.cluster(name, self._claimed_term), became_primary
        )
        server = self._servers[process] = ServerProcess(settings)
        process.on_death.append(partial(self._ended, process, server))
        process.start(self._serve(process, server))

    def _ended(self, process: Process, server: ServerProcess) -> None:
        server.close_files()
        if self.draw.is_shard and not server.has_journal:
            self._without_journal.add(process.name)
        else:
            self._without_journal.discard(process.name)

    async def _serve(self, process: Process, server: ServerProcess) -> None:
        try:
            await server.start()
            if server.dropped and process.name not in self._without_journal:
                self.fail(f"the journal was dropped: {server.dropped}")
            await server.run_until_over()
            self.network.soon(self.kill, process.name)  # its supervisor starts it again
        except Exception as error:  # noqa: BLE001 - any failure to start is a finding
            self.fail(f"the server does not start: {error!r}")

    def kill_server_in_a_write(self) -> None:
        """Kills a server in the middle of the next frame of its journal, or at once without a journal."""

        def kill() -> None:
            process = current_process()
            self.kill(process.name if process else self.draw.servers[0])

        if self._folder is None:
            kill()
        else:
            tear_next_write(self.random.random(), kill)

    def lose_machines(self) -> None:
        """Kills the servers of a shard with their journals. An operator lets a new one begin the next term.

        Nothing that the old ones have sent may still be on its way then.
        """
        record = self._store.get().record
        if record is None or any(self.processes[name].is_dead for name in self.draw.servers):
            return
        self.trace("all machines are lost")
        self._claimed_term = max(record.term, self._claimed_term) + 2  # a takeover may be on its way
        self.checks.lose_state()
        for name in self.draw.servers:
            self.network.cut_ways.get((name, DIRECTORY), []).clear()
            self.kill(name, MACHINE_SECONDS)
            if self._folder:
                shutil.rmtree(self._folder / name)

    def terminate(self, name: str) -> None:
        """Ends a server with SIGTERM."""
        process = self.processes[name]
        if not process.is_dead:
            self.trace("%s: SIGTERM", name)
            process.run(self._servers[process].terminate)

    def sever_hosts(self, one: str, other: str) -> None:
        """Breaks all connections between two hosts."""
        self.wire.sever_hosts(one, other)
        self.streams.sever(lambda connection: {each.name for each in connection.processes} == {one, other})

    def _sever_process(self, process: Process) -> None:
        self.wire.sever_process(process)
        self.streams.sever(lambda connection: process in connection.processes)

    def operate(self) -> None:
        """Starts an action of the operator."""
        operator = Operator(POOL, self.draw.addresses, self.random, self.trace)
        Process(self.loop, "operator").start(operator.act())

    def start_rank(self, rank: int) -> None:
        """Starts a process of a rank."""
        process = self._new_process(f"rank{rank}")
        settings = RankSettings(
            POOL,
            self._address,
            self.draw.registration(rank),
            layouts(self.draw.config),
            self.draw.config.num_host_blocks,
            self.random,
            self.fail,
            self.trace,
        )
        ranks = RankProcess(settings)
        self.lines.add(rank, process, ranks)
        process.start(self._supervise_rank(process, ranks))

    def start_scheduler(self, number: int) -> None:
        """Starts a scheduler process; a successor replaces it when its engine fails."""
        process = self._new_process(f"scheduler{number}")
        settings = self._settings[number]
        settings.ranks = self.lines.to_all(process)
        process.start(self._supervise(process, SchedulerProcess(settings)))

    async def _supervise_rank(self, process: Process, rank: RankProcess) -> None:
        await rank.main()
        self.network.soon(self.kill, process.name)  # it failed permanently: start a successor

    async def _supervise(self, process: Process, scheduler: SchedulerProcess) -> None:
        try:
            await scheduler.main()
        except EngineError as error:
            self.trace("%s: engine failed: %s", process, error)
            self.network.soon(self.kill, process.name)
            return
        except Exception as error:  # noqa: BLE001 - any unexpected error of a scheduler is a finding
            self.fail(f"{process}: {error!r}")
            return
        self.trace("%s: done", process)
        self.schedulers_left -= 1

    def kill(self, name: str, pause_seconds: float = 0.0) -> None:
        """Kills a process, and starts its successor a little later, or after a longer pause."""
        process = self.processes[name]
        if process.is_dead:
            return
        self.trace("%s: killed", name)
        process.kill()
        # A host without power resets no connections: its peers notice missing ping replies.
        late_seconds = self.random.choice((0.0, 0.0, DEAD_PEER_SECONDS))
        self.network.at(self.loop.now_seconds + late_seconds, self._sever_process, process)
        pause_seconds += 0.5 * self.random.random()
        self.network.at(self.loop.now_seconds + pause_seconds, self._start_again, name)

    def _start_again(self, name: str) -> None:
        self.trace("%s: started", name)
        if name in self.draw.servers:
            self.start_server(name)
        elif name.startswith("rank"):
            self.start_rank(int(name.removeprefix("rank")))
        else:
            self.start_scheduler(int(name.removeprefix("scheduler")))

    def _new_process(self, name: str) -> Process:
        process = Process(self.loop, name, 1000 * self.random.random(), 1 + 0.02 * (self.random.random() - 0.5))
        self.processes[name] = process
        return process

    def _scheduler_settings(self, number: int) -> SchedulerSettings:
        return SchedulerSettings(
            POOL,
            self._address,
            self.draw.lease_seconds[number],
            list(self.draw.jobs[number]),
            self.random,
            self.lines.unassigned,
            self.checks,
            self.trace,
            self.draw.quotas[number],
            max_in_flight=self.draw.max_in_flight[number],
            reserve_tokens=self.draw.reserve_tokens[number],
        )
