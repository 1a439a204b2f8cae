"""Starts and stops a server: its services, addresses and background tasks."""

import asyncio
import logging
import random
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.commands import LoseSessions
from kvpool.core.errors import NotPrimaryError
from kvpool.core.memory_probe import process_memory
from kvpool.core.state import State
from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.permissions import RULES
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.shard_member import EPOCHS_PER_TERM, ShardMember
from kvpool.server.config import MetricsConfig, ServerConfig
from kvpool.server.crash import crash
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.guard.guard import Guard, Handler
from kvpool.server.guard.primary_check import PrimaryCheck
from kvpool.server.guard.token_check import TokenCheck
from kvpool.server.journal.journal import Journal
from kvpool.server.limits.connections import max_connections, raise_file_limit
from kvpool.server.limits.freed_memory import collect_old_garbage_rarely, keep_freed_memory, return_freed_memory
from kvpool.server.metrics.observations import Observations
from kvpool.server.services.admin_service import AdminService
from kvpool.server.services.allocator_service import AllocatorService
from kvpool.server.services.clock import ServerClock
from kvpool.server.services.components import Components
from kvpool.server.services.deadlines import watch_deadlines, watch_integrity
from kvpool.server.services.directory_service import DirectoryService
from kvpool.server.services.event_service import EventService
from kvpool.server.services.standard_service import Health, Reflection
from kvpool.server.services.step_links import StepLinks
from kvpool.server.services.worker_service import WorkerService
from kvpool.server.shutdown import stopping_error
from kvpool.server.status import Status
from kvpool.v1 import (
    admin_pb2_grpc,
    allocator_pb2_grpc,
    directory_pb2_grpc,
    event_pb2_grpc,
    step_pb2,
    worker_pb2_grpc,
)
from kvpool.wire.address import BoundSocket, bind_error, ip_addresses
from kvpool.wire.channels import server_channel_options
from kvpool.wire.http_server import HttpServer

_SERVICES: Final = frozenset(method.partition("/")[0] for method in RULES if method.startswith("kvpool."))
"""The names of kvpool's services: each of their methods has a rule."""
_DIRECTORY: Final = "kvpool.v1.DirectoryService"
"""The service that also a standby serves."""

_RESTART_GRACE_SECONDS: Final = 0.2
"""Time in which calls that a deposed server ends learn who the primary is."""
_RECHECK_SECONDS: Final = 1.0
"""Interval at which credentials, and the tokens of open calls, are checked again."""

_log = logging.getLogger("kvpool.server")


class Server:
    """A kvpool server in the current event loop.

    Raises:
        OSError: A certificate or the token file is invalid, or the limit of open files is too low.

    Attributes:
        components: The parts that the services share.
        shard: This server's part in its shard; None without a cluster.
        is_deposed: Set by `be_deposed`, so that this process starts again.
    """

    def __init__(self, config: ServerConfig, faults: FaultPoints = NO_FAULTS) -> None:
        self._config = config
        connections = max_connections(config.limits.max_connections, config.addresses)
        self._metrics: HttpServer | None = None
        new_state = partial(State, _block_lifetimes(config.metrics), secrets.token_bytes(16))
        self._journal = _journal(config, new_state, faults)
        state = self._journal.state if self._journal else new_state()
        clock = ServerClock()
        try:
            authorities = config.cluster.replication_tls_ca
            self._certificates = Certificates(config.auth, authorities) if config.auth.tls_cert else None
            self._tokens = TokenFile(config.auth.tokens) if config.auth.tokens else None
        except ValueError as error:
            raise OSError(str(error)) from error
        self.shard: ShardMember | None = None
        self.is_deposed = asyncio.Event()
        self._bound: list[BoundSocket] = []
        if config.cluster.url and self._journal:
            from kvpool.server.shard_setup import make_member  # noqa: PLC0415 - others need no etcd

            replicated = ReplicatedState(self._journal, new_state, clock)
            self.shard = make_member(config, replicated, self, certificates=self._certificates, tokens=self._tokens)
        recorder = self.shard.recorder if self.shard else self._journal
        parts = self.components = Components(config, state, recorder, faults, clock)
        if self.shard:
            parts.ranks.is_answering = self.shard.gate.is_confirming
        self._health = Health()
        tokens, seen = self._tokens, Observations()
        self._token_check = (
            TokenCheck(tokens, state, parts.calls, config.limits.max_token_calls, seen) if tokens else None
        )
        primary = PrimaryCheck(self.shard.gate, self.shard.refusal) if self.shard else None
        guard = Guard(config.limits, seen, self._token_check, primary, parts.tracer)
        self._server = grpc.aio.server(
            interceptors=[guard],
            options=server_channel_options(
                config.max_message_bytes, config.dead_peer_seconds, connections, config.limits.stall_seconds
            ),
            maximum_concurrent_rpcs=config.limits.max_calls,
        )
        self._tasks: list[asyncio.Task[None]] = []
        admin = AdminService(parts, self.shard)
        self._status = Status(
            parts,
            seen,
            tokens=tokens,
            certificates=self._certificates,
            journal=self._journal,
            shard=self.shard,
            server_info=admin.server_info,
        )
        allocator = AllocatorService(parts, seen if config.metrics.address else None)
        self._links = _step_links(config, parts, guard, allocator, connections)
        allocator_pb2_grpc.add_AllocatorServiceServicer_to_server(allocator, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        event_pb2_grpc.add_EventServiceServicer_to_server(EventService(parts), self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(parts), self._server)
        directory = DirectoryService(parts, self.shard, config.addresses)
        directory_pb2_grpc.add_DirectoryServiceServicer_to_server(directory, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(names, parts.calls), self._server)

    async def start(self) -> list[str]:
        """Starts serving.

        Returns:
            The addresses that it listens on, with port 0 replaced by the chosen port.

        Raises:
            OSError: An address cannot be bound.
        """
        addresses = [self._bind(address) for address in self._config.addresses]
        if self._journal and not self.shard:
            self._journal.begin()
            self.components.restore()
        if self.shard:
            await self.shard.replicator.listen()
        if self._config.metrics.address:
            self._metrics = self._status.serve()
            self._run(self._status.collector.watch(), "watch_status")
        certificates = self._certificates  # after the addresses of settings: a default does not take one of them
        steps = await self._links.listen(certificates.new_link_context if certificates else None)
        self.components.step_listener = self._links.listener
        await self._server.start()
        if self._journal:
            self._run(self._journal.run(), "write_journal")
        if self._token_check or self._certificates:
            self._run(self._watch_credentials(), "watch_credentials")
        if not self._token_check and not all(address.startswith("unix:") for address in addresses):
            _log.warning("no authentication configured", extra={"addresses": addresses})
        if self.shard:
            await self._join(self.shard)
        else:
            await self._serve()
        self._status.is_started = True
        extra = {"addresses": addresses, "steps": steps, "journal": self._config.journal.folder or "none"}
        _log.info("server listening", extra=extra)
        return addresses

    async def _join(self, shard: ShardMember) -> None:
        """Joins the shard. Until the server is the primary, it serves only what any server of the shard answers."""
        for name in _SERVICES:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        for name in ("", _DIRECTORY):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        shard.start()

    async def _serve(self) -> None:
        """Begins to serve the pools and sessions of the state."""
        parts = self.components
        max_bytes = process_memory.max_bytes = self._config.limits.max_memory_bytes
        if max_bytes:
            self._run(return_freed_memory(max_bytes), "return_freed_memory")
        self._run(watch_deadlines(parts), "watch_deadlines")
        self._run(watch_integrity(parts), "watch_integrity")
        self._run(parts.ranks.send_fences(), "send_fences")
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _run(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(_crash_after_bug)
        self._tasks.append(task)

    def become_primary(self, term: int, *, is_state_lost: bool) -> None:
        """Serves the state that this server has as a member of its shard."""
        if self._journal:
            self._journal.begin()
        if self.shard:
            self.components.clock.advance_to(self.shard.state.primary_seconds)
        self.components.pools.past_epoch = max(self.components.pools.past_epoch, term * EPOCHS_PER_TERM)
        if is_state_lost:
            self.components.executor.execute(LoseSessions())
        self.components.restore(expects_ranks=True)
        self._run(self._serve(), "serve")

    def be_deposed(self, error: NotPrimaryError) -> None:
        """Ends all calls. Another server is the primary, the shard was removed, or a task of the shard has failed."""
        self.components.turns.reject_all(error)
        self.components.calls.end_all(error)
        self.is_deposed.set()

    async def run_until_over(self) -> bool:
        """Waits until the server should stop, hands over to a standby, and stops.

        Returns:
            Whether the process should start again, as a standby.
        """
        waits = [asyncio.create_task(self.components.shutdown.wait()), asyncio.create_task(self.is_deposed.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        restarts = not waits[0].done()
        for wait in waits:
            wait.cancel()
        await self.hand_over()
        await self.stop()
        return restarts and not self.components.shutdown.is_requested

    async def hand_over(self) -> None:
        """Lets an in-sync standby take over, if there is one and this server is the primary."""
        if not self.shard:
            return
        if await self.shard.hand_overs.run(self.components.turns.hold, self.components.turns.resume):
            await self.is_deposed.wait()
        elif self.shard.refusal() is None:
            _log.warning("primary stops without a standby", extra={"shard": self.shard.name})

    async def stop(self) -> None:
        """Stops accepting calls, ends open streams, and gives calls in flight the grace time to finish."""
        await self._health.enter_graceful_shutdown()
        parts = self.components
        start_seconds = parts.clock.now_seconds()
        _log.info("drain started", extra={"seconds": self._config.grace_seconds})
        parts.shutdown.is_stopping = True
        open_calls = parts.calls.all_open()
        parts.calls.end_all(stopping_error())
        grace_seconds = _RESTART_GRACE_SECONDS if self.is_deposed.is_set() else self._config.grace_seconds
        await asyncio.gather(self._server.stop(grace_seconds), self._links.stop(grace_seconds))
        for bound in self._bound:
            bound.remove()
        for call in open_calls:  # gRPC does not wait for calls whose client has gone
            await call.wait_ended()
        _log.info("drain ended", extra={"seconds": round(parts.clock.now_seconds() - start_seconds, 3)})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._metrics:  # a scrape in progress waits for the loop, so the loop must keep running
            await asyncio.to_thread(self._metrics.stop)
        if self.shard:
            await self.shard.stop()
        if self._journal:
            self._journal.close()
        if parts.tracer:
            await parts.tracer.stop()
        _log.info("server stopped")

    async def _watch_credentials(self) -> None:
        """Takes changed tokens and certificates every second, without waiting for a call. Runs indefinitely."""
        while True:
            await asyncio.sleep(_RECHECK_SECONDS)
            try:
                if self._token_check:
                    self._token_check.recheck()
                if self._certificates:
                    self._certificates.refresh()
            except Exception:  # noqa: BLE001 - a later revocation must still end streams
                _log.exception("bug", extra={"method": "watch_credentials"})

    def _bind(self, address: str) -> str:
        """Listens on an address; on all IP addresses of a name, as gRPC accepts that some of them cannot be bound."""
        if address.startswith("unix:"):
            bound = BoundSocket(address)
            self._bound.append(bound)
            with bound.made(self._config.auth.socket_mode):
                self._add_port(bound.address, address)
            return address
        host, _, port = address.rpartition(":")
        for each in ip_addresses(address):
            described = address if each == address else f"{address}, which stands for {each}"
            port = str(self._add_port(f"{each.rpartition(':')[0]}:{port}", described))
        return f"{host}:{port}"

    def _add_port(self, bound: str, described: str) -> int:
        try:
            if self._certificates and not bound.startswith("unix:"):
                return self._server.add_secure_port(bound, self._certificates.new_credentials())
            return self._server.add_insecure_port(bound)
        except RuntimeError as error:  # gRPC gives no reason
            raise OSError(f"cannot listen on {described}{bind_error(bound)}") from error


async def serve(
    config: ServerConfig,
    ready: Callable[[list[str]], None] | None = None,
    faults: FaultPoints = NO_FAULTS,
) -> bool:
    """Serves until SIGTERM, SIGINT or a stop requested by an operator, then stops gracefully.

    A primary of a shard hands over to a standby before it stops. One that is deposed ends its calls.

    Args:
        config: The settings.
        ready: Called with the addresses when the server listens.
        faults: Fault points; tests arm them.

    Returns:
        Whether the process should start again, as a standby.
    """
    # not a loop's `add_signal_handler`: where that ends, the next signal ends the process with a failure
    signals, writer = socket.socketpair()
    with signals, writer:
        writer.settimeout(0)  # the wake-up file must not block
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        _handle_signals(lambda *_: None)
        try:
            restarts = await _serve_until_over(config, ready, faults, signals)
        finally:
            signal.set_wakeup_fd(-1)
    if not restarts:
        _handle_signals(signal.SIG_IGN)
    return restarts


async def _serve_until_over(
    config: ServerConfig, ready: Callable[[list[str]], None] | None, faults: FaultPoints, signals: socket.socket
) -> bool:
    raise_file_limit()
    keep_freed_memory()
    server = Server(config, faults)

    def on_signals() -> None:
        for _ in signals.recv(64):
            server.components.shutdown.on_signal(config.drain_seconds)

    loop = asyncio.get_running_loop()
    loop.add_reader(signals, on_signals)
    try:
        addresses = await server.start()
        collect_old_garbage_rarely()
        if ready:
            ready(addresses)
        return await server.run_until_over()
    finally:
        loop.remove_reader(signals)


def _handle_signals(handler: Callable[..., None] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _step_links(
    config: ServerConfig, parts: Components, guard: Guard, allocator: AllocatorService, max_links: int
) -> StepLinks:
    """Makes the links of a server. The guard treats each as a call of Schedule."""
    call: Handler = grpc.stream_stream_rpc_method_handler(allocator.serve_link, step_pb2.Step.FromString)
    handler = guard.wrap(call, "kvpool.v1.AllocatorService/Schedule")
    return StepLinks(config, handler, parts.processes, secrets.token_hex(16), max_links)


def _journal(config: ServerConfig, new_state: Callable[[], State], faults: FaultPoints) -> Journal | None:
    if not config.journal.folder:
        return None
    return Journal(config.journal, new_state, faults=faults, past_epoch=config.past_epoch)


def _block_lifetimes(config: MetricsConfig) -> Callable[[], BlockLifetimes | None]:
    if not config.address or not config.block_sample_rate:
        return lambda: None
    return partial(BlockLifetimes, max(round(1 / config.block_sample_rate), 1), random.randrange)


def _crash_after_bug(task: asyncio.Task[None]) -> None:
    """Ends the process if a bug has ended a background task, without which leases never expire, for example."""
    if not task.cancelled() and (error := task.exception()):
        extra = {"method": task.get_name()}
        _log.critical("bug: a task of the server failed, the server exits", extra=extra, exc_info=error)
        crash()
