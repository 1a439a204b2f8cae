"""Starts, kills and stops the processes of a run: a server, schedulers, and the ranks of a pool."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crash.memory import Progress, StepLock
from crash.records import Log
from crash.scheduler import LENT_POOL, Settings
from support import processes
from support.bugs import bugs_in
from support.logging_process import LoggingProcess, wait_stopped
from support.server import KVPOOL, CommandLineServer
from support.waiting import DEADLINE_SECONDS

DEAD_PEER_SECONDS: Final = 2.0
SERVER_TIMING: Final = (
    *("--heartbeat-seconds", "0.3", "--heartbeat-timeout-seconds", "2", "--rank-grace-seconds", "4"),
    *("--dead-peer-seconds", str(DEAD_PEER_SECONDS)),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Processes and settings of a run.

    Attributes:
        seed: Seed of all random decisions.
        schedulers: Number of schedulers; with ranks, every fourth one uses their pool.
        ranks: Number of workers that form a pool; 0 for none.
        lends: Whether a worker lends memory; every fourth scheduler maps it.
        journaled: Whether the server keeps a journal.
        is_cluster: Whether two servers share a shard; see `crash.cluster`.
        has_hosts: Whether these servers are on hosts of their own, which can be cut off from everything.
        lease_seconds: Lease of the sessions.
        num_blocks: Blocks of the pool that schedulers create.
        step_seconds: Maximum duration of a step.
        is_brief: Whether schedulers log the times of their steps only.
        command: The command that runs `kvpool serve`.
        options: More options of it.
    """

    seed: int
    schedulers: int = 8
    ranks: int = 2
    lends: bool = False
    journaled: bool = False
    is_cluster: bool = False
    has_hosts: bool = False
    lease_seconds: float = 2.0
    num_blocks: int = 240
    step_seconds: float = 0.01
    is_brief: bool = False
    command: tuple[str, ...] = KVPOOL
    options: tuple[str, ...] = ()

    def maps_memory(self, slot: int) -> bool:
        """Whether a scheduler maps lent memory."""
        return self.lends and slot % 4 == 1


class Site:
    """The processes of a run, and the folder of their files.

    Attributes:
        plan: Settings of the run.
        address: Address of the server.
        folder: Folder of logs and memory.
        log: Log of actions on the processes.
        progress: Answered steps of the schedulers.
        servers: All processes of servers that were started.
    """

    expected_errors: tuple[str, ...] = ()
    """Messages of errors that a run causes in the log of a correct server."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan = plan
        self.folder = folder
        self.address = f"unix:{folder / 'socket'}"
        self.log = Log(folder / "run.jsonl")
        self.progress = Progress(folder)
        self.server: CommandLineServer | None = None
        self.servers: list[CommandLineServer] = []
        self._schedulers: dict[int, LoggingProcess] = {}
        self._lives: dict[int, int] = {}
        self._ranks: dict[int, LoggingProcess] = {}
        self._lender: LoggingProcess | None = None
        self.lent_memory = folder / "lent-memory"

    def start(self) -> None:
        """Starts all processes."""
        self.start_server()
        for rank in range(self.plan.ranks):
            self.start_rank(rank)
        if self.plan.lends:
            self.lent_memory.mkdir()
            self.start_lender()
        for slot in range(self.plan.schedulers):
            self.start_scheduler(slot)

    def start_server(self, faults: str = "") -> bool:
        """Starts the server; returns whether it listened before it died at a fault point."""
        self.log.write("starting", target="server", faults=faults)
        options = ["--grace-seconds", "2", *SERVER_TIMING, *self.plan.options]
        if self.plan.journaled:
            options += ["--journal", str(self.folder / "journal")]
        command = self.plan.command
        self.server = CommandLineServer(self.address, options=options, command=command, faults=faults, waits=False)
        self.servers.append(self.server)
        try:
            self.server.wait_until_listening()
        except AssertionError:
            if not faults:
                raise
            return False
        self.log.write("listening", target="server")
        return True

    def start_scheduler(self, slot: int) -> None:
        """Starts a scheduler, or its successor."""
        life = self._lives[slot] = self._lives.get(slot, -1) + 1
        settings = Settings(
            address=self.address,
            folder=str(self.folder),
            slot=slot,
            life=life,
            seed=self.plan.seed,
            ranks=self.plan.ranks if slot % 4 == 3 else 0,
            lender=f"unix:{self.folder / 'lender'}" if self.plan.maps_memory(slot) else "",
            num_blocks=self.plan.num_blocks,
            lease_seconds=self.plan.lease_seconds,
            step_seconds=self.plan.step_seconds,
            is_brief=self.plan.is_brief,
        )
        self._schedulers[slot] = LoggingProcess(*settings.command())

    def start_rank(self, rank: int) -> None:
        """Starts a rank, or its successor."""
        arguments = [self.address, str(self.folder), str(rank), str(self.plan.ranks)]
        self._ranks[rank] = LoggingProcess(processes.PYTHON, "-m", "crash.rank", *arguments)

    def start_lender(self) -> None:
        """Starts the worker that lends memory, or its successor."""
        command = [*KVPOOL, "worker", "--server", self.address, "--pool", LENT_POOL, "--rank", "0"]
        command += ["--device", "cpu", "--memory", "1MiB", "--lend", f"unix:{self.folder / 'lender'}"]
        self._lender = LoggingProcess(*command, "--lend-folder", str(self.lent_memory))

    def signal_lender(self, number: signal.Signals) -> None:
        """Kills, stops or continues the worker that lends memory."""
        assert self._lender
        send(self._lender, number)

    def signal_server(self, number: signal.Signals) -> None:
        """Kills, stops or continues the server."""
        assert self.server
        send(self.server, number)

    def signal_scheduler(self, slot: int, number: signal.Signals) -> None:
        """Kills, stops or continues a scheduler; stops it during a step only if it maps lent memory."""
        process = self._schedulers[slot]
        lock = StepLock(self.folder / f"scheduler-{slot}.lock").held()
        with contextlib.nullcontext() if self.plan.maps_memory(slot) else lock:
            send(process, number)
            if number == signal.SIGSTOP:
                wait_stopped(process.pid)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Kills, stops or continues a rank."""
        send(self._ranks[rank], number)

    def wait_for_steps(
        self, slots: list[int], *, every: bool, count: int = 1, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until any of the schedulers, or every one, has `count` more answered steps."""
        before = {slot: self.progress.of(slot) for slot in slots}
        due = time.monotonic() + DEADLINE_SECONDS
        combine = all if every else any
        while not unless() and not combine(self.progress.of(slot) >= before[slot] + count for slot in slots):
            if time.monotonic() > due:
                stuck = [slot for slot in slots if self.progress.of(slot) < before[slot] + count]
                self.log.write("violation", what="NO_PROGRESS", schedulers=stuck)
                return
            self.check_alive()
            time.sleep(0.01)

    def check_alive(self) -> None:
        """Logs schedulers and ranks that ended by themselves, and restarts them."""
        for slot, scheduler in list(self._schedulers.items()):
            if self._has_ended(scheduler, "SCHEDULER_ENDED"):
                self.start_scheduler(slot)
        for rank, child in list(self._ranks.items()):
            if self._has_ended(child, "RANK_ENDED"):
                self.start_rank(rank)
        if self._lender and self._has_ended(self._lender, "LENDER_ENDED"):
            self.start_lender()

    def _has_ended(self, process: LoggingProcess, what: str) -> bool:
        """Whether a process ended by itself; logs that."""
        if process.is_alive or process.end() == -signal.SIGKILL:
            return False
        self.log.write("violation", what=what, status=process.end(), lines=process.lines[-30:])
        return True

    def stop_schedulers(self) -> None:
        """Stops the schedulers, which close their sessions first."""
        for process in self._schedulers.values():
            process.signal(signal.SIGTERM)
        for process in self._schedulers.values():
            if status := process.end():
                self.log.write("violation", what="SCHEDULER_FAILED", status=status, lines=process.lines[-30:])
        self._schedulers.clear()

    def close(self) -> None:
        """Kills all remaining processes, and reports bugs in the servers' logs."""
        for process in (
            *self._schedulers.values(), *self._ranks.values(), *filter(None, [self._lender]), *self.servers
        ):  # fmt: skip
            process.kill()
        for i, server in enumerate(self.servers):
            (self.folder / f"server-{i}.err").write_text(server.log)
            if bugs := bugs_in(server.log, self.expected_errors):
                self.log.write("violation", what="SERVER_BUG", bugs=bugs, lines=server.lines[-60:])


def send(process: LoggingProcess, number: signal.Signals) -> None:
    """Sends a signal, and waits for the end of a killed process."""
    process.signal(number)
    if number == signal.SIGKILL:
        process.end()
