"""The side of an engine's process: maps the memory of a rank, and runs steps on it as long as the lender permits.

1. A step runs if the lender knows its session, and no fence that the lender sent before excludes the session. Each step
   looks at what the lender has sent, so a process that was stopped past its lease runs none when it continues.
2. A fence is answered when no step that it excludes is in flight: by the step that finds the fence, or by a thread.
3. While the connection is broken, steps that the newest fence admits may run: the memory is mapped, and the server
   gives out no blocks without the rank. A thread connects again, maps again and names the sessions again.
4. If the lender then has other memory, or refuses, no step runs any more. Until the thread has learned that, steps of
   an ended epoch can run. They use the old memory, of which the server gives out no block any more; the new memory is
   another file. A lender that kept the memory has a list of the processes and their sessions. It is not ready for the
   next epoch before this process has answered the fence that excludes these sessions.
5. A lease of a later epoch shows that the epoch has passed: the memory is mapped again, and the step waits for that.
6. While the memory is unmapped, no step runs. Each new connection reports this before it names the sessions. The lender
   sends no fences meanwhile, so each session is named again before its first step after the memory is mapped.
7. One lock covers the connection, the fence, the named sessions and the mapping.
8. A process that is forked from this one runs no step: the lender would not learn of it.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from kvpool.core.errors import InvalidArgumentError, KvpoolError, UnavailableError, WrongStateError
from kvpool.core.ids import TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.lending.connection import Connection
from kvpool.lending.fence import Fence, StaleTablesError, StepTicket
from kvpool.lending.mapped_memory import reserve_memory
from kvpool.lending.memory_file import close_all
from kvpool.lending.requests import (
    Mapping,
    ask_again,
    check_mapped,
    give_back,
    request_bind,
    request_memory,
    request_unmap,
)
from kvpool.v1 import lending_pb2
from kvpool.v1.link_pb2 import LinkHello
from kvpool.wire.backoff import Backoff
from kvpool.wire.errors import DeadlineError

_log = logging.getLogger("kvpool.lending")

_LAUNCH_SECONDS: Final = 0.05
"""How often the thread looks for steps to finish, while one that a fence excludes is in flight."""


def connect_lender(
    address: str, pool_name: str, token: str = "", client_name: str = "", *, timeout_seconds: float = 30.0
) -> "LenderClient":
    """Connects a process of an engine to the lender of its rank.

    Args:
        address: `unix:/path`, the socket of `kvpool worker --lend`.
        pool_name: Name of the pool that the engine is configured for.
        token: Token of the pool; empty for none.
        client_name: Name of the process, for display.
        timeout_seconds: How long to wait for the answer to this and to later messages, `LenderClient.map` excepted.

    Raises:
        InvalidArgumentError: The address has another form.
        UnavailableError: Nothing listens there; says why.
        WrongStateError: Another program listens there, or a lender of another pool or of another protocol version.
        KvpoolError: The lender refuses the process, or does not answer in time.
    """
    lending = lending_pb2.LendingHello(pool_name=pool_name, client_name=client_name, client_id=uuid.uuid4().hex)
    return LenderClient(address, LinkHello(token=token, lending=lending), timeout_seconds)


class LenderClient:
    """A connection to a lender, which is made again when it breaks. Thread-safe.

    Attributes:
        address: Socket of the lender.
        offer: The memory that the lender had when the process connected.
    """

    def __init__(self, address: str, hello: LinkHello, timeout_seconds: float) -> None:
        """See `connect_lender`."""
        self.address: Final = address
        self._hello: Final = hello
        self._pid: Final = os.getpid()
        self._timeout_seconds: Final = timeout_seconds
        self._finish_steps: Callable[[], object] | None = None
        self._fence: Final = Fence(self._wake)
        self._mapping: Mapping | None = None
        self._newest_epoch = 0
        """Newest epoch that the lender or a lease has named."""
        self._sessions: set[TableLease] = set()
        self._final_error: StaleTablesError | None = None
        self._is_closed = False
        self._lock: Final = threading.Lock()
        self._reconnected: Final = threading.Condition(self._lock)
        self._connection: Connection | None = None
        connection, self.offer = self._connect()
        self._connection = connection
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.settimeout(0)
        self._thread: Final = threading.Thread(target=self._run, name="kvpool-lending", daemon=True)
        self._thread.start()

    def map(
        self,
        declared: DeclaredMemory,
        timeout_seconds: float,
        *,
        finish_steps: Callable[[], object] | None = None,
        weights_bytes: int = 0,
    ) -> "LentMemory":
        """Maps the memory, when all ranks of the pool are ready.

        Args:
            declared: The layout that the engine needs on this rank.
            timeout_seconds: How long to wait for the other ranks.
            finish_steps: Waits for the steps in flight and finishes their tickets; called from a thread when a fence
                excludes a step in flight. None if the caller of `step` finishes its ticket soon.
            weights_bytes: What the engine's weights take of the device, which later offers state; 0 for unknown.

        Raises:
            WrongStateError: The memory has another size than declared (SIZE_DIFFERS), or is smaller than that
                (DESCRIPTOR_TOO_SMALL); this process was forked after it connected (FORKED); or the lender refuses, for
                example because another engine laid it out otherwise.
            KvpoolError: The lender refuses, does not answer in time, or is gone.
        """
        self._check_process()
        with self._lock:
            if self._mapping:
                raise WrongStateError("ALREADY_MAPPED", "this process has mapped the memory before")
            memory = reserve_memory(self.offer.device, declared.size_bytes)
            self._finish_steps = finish_steps
            mapping = self._map(Mapping(declared, timeout_seconds, memory, weights_bytes))
        return LentMemory(self, mapping)

    def unmap(self) -> None:
        """See `LentMemory.unmap`."""
        self._check_process()
        self._finish_launched_steps()
        with self._lock:
            self._check_final()
            if not self._mapping or not self._mapping.memory.is_mapped:
                return
            if self._fence.num_in_flight:
                raise WrongStateError("STEPS_IN_FLIGHT", "the memory cannot be unmapped while a step uses it")
            self._mapping.unmap()
            if self._connection:
                try:
                    request_unmap(self._connection)
                    self._read()  # a fence may have come with the answer
                except KvpoolError as error:
                    self._lose(error)  # the lender learns of it on the next connection
        _log.info("memory unmapped", extra={"address": self.address})

    def map_again(self) -> None:
        """See `LentMemory.map_again`."""
        self._check_process()
        with self._lock:
            self._check_final()
            if not self._mapping or self._mapping.memory.is_mapped:
                return
            self._read()  # the lender may have been started again
            self._map(self._mapping)
            self._sessions.clear()
        _log.info("memory mapped again", extra={"address": self.address})

    def bind(self, lease: TableLease) -> None:
        """Names a session of the engine to the lender, which reports it as gone when the processes have exited.

        Raises:
            WrongStateError: This process was forked after it connected (FORKED).
            KvpoolError: The lender refuses the session, does not answer in time, or is gone.
        """
        self._check_process()
        with self._lock:
            self._bind(lease)

    def step(self, lease: TableLease) -> StepTicket:
        """See `LentMemory.step`."""
        self._check_process()
        with self._lock:
            self._check_final()
            if self._mapping and not self._mapping.memory.is_mapped:
                raise WrongStateError("UNMAPPED", "no step runs while the memory is unmapped: the engine sleeps")
            self._read()
            if self._mapping and lease.epoch > self._newest_epoch:
                self._connect_for(lease.epoch)
            if lease not in self._sessions and lease.epoch == self._fence.epoch:
                self._bind(lease)
            return self._fence.step(lease)

    def close(self) -> None:
        """Ends the connection. No step runs afterwards. Repeats do nothing.

        If no step is in flight, the lender learns that this process does not write any more (from a thread, if it is
        away). Otherwise the process counts until it has exited. Does nothing in a process forked from this one.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._final_error = self._final_error or StaleTablesError("CLOSED", "the memory was given back")
        self._finish_launched_steps()
        with self._lock:
            if self._mapping and not self._fence.num_in_flight:
                self._give_back()
                if self._mapping.host:
                    self._mapping.host.unregister()
            self._stop(self._final_error)
            self._wake()
        self._thread.join()
        self._waker.close()
        self._woken.close()

    def _check_process(self) -> None:
        """Needs no lock: a thread of the other process may have held it."""
        if self._pid != os.getpid():
            message = "this process was forked after it connected: call connect_lender() in it"
            raise WrongStateError("FORKED", message)

    # The rest runs with the lock, unless it says otherwise.

    def _map(self, mapping: Mapping) -> Mapping:
        """Asks for the memory, and maps it. If it cannot be mapped, no step runs any more."""
        connection = self._usable_connection(time.monotonic() + self._timeout_seconds)
        try:
            mapped, descriptors = request_memory(connection, mapping)
        except KvpoolError:
            self._read()
            raise
        try:
            check_mapped(mapped, mapping)
            mapping = mapping.with_answer(mapped, self.offer.device)
            mapping.map(descriptors)
        except BaseException as error:
            self._give_back()
            self._stop(error if isinstance(error, StaleTablesError) else StaleTablesError("NOT_MAPPED", str(error)))
            raise
        finally:
            close_all(descriptors)
        self._mapping = mapping
        self._begin(mapped.epoch)
        self._read()  # a fence may have come with the answer
        return mapping

    def _give_back(self) -> None:
        if self._connection:
            with contextlib.suppress(KvpoolError):
                request_unmap(self._connection)
                return
        arguments = self.address, self._hello, self._timeout_seconds
        threading.Thread(target=give_back, args=arguments, name="kvpool-lending-unmap", daemon=True).start()

    def _connect_for(self, epoch: int) -> None:
        """Has the thread connect and map again, and waits for that."""
        self._newest_epoch = epoch  # once per epoch
        self._lose(UnavailableError("EPOCH_PASSED", f"epoch {epoch} has begun"))
        self._usable_connection(time.monotonic() + self._timeout_seconds)

    def _stop(self, error: StaleTablesError) -> None:
        self._final_error = self._final_error or error
        self._fence.end()
        if self._connection:
            self._connection.close()
            self._connection = None
        self._reconnected.notify_all()

    def _check_final(self) -> None:
        if self._final_error:
            raise StaleTablesError(self._final_error.reason, self._final_error.message)

    def _bind(self, lease: TableLease) -> None:
        """Names a session; again on the next connection if this one breaks."""
        deadline = time.monotonic() + self._timeout_seconds
        while lease not in self._sessions:
            connection = self._usable_connection(deadline)
            try:
                request_bind(connection, lease, self._timeout_seconds)
            except UnavailableError:
                self._read()
                if not connection.has_failed:
                    raise
            except KvpoolError:
                self._read()
                raise
            else:
                self._sessions.add(lease)
        self._read()  # a fence may have come with the answer

    def _usable_connection(self, deadline: float) -> Connection:
        """Waits for the connection if it is broken."""
        if not self._connection:
            seconds = deadline - time.monotonic()
            self._reconnected.wait_for(lambda: self._connection or self._final_error, seconds)
        self._check_final()
        if not self._connection:
            message = f"{self.address}: the connection to the lender is broken"
            raise UnavailableError("LENDER_GONE", message, retry_seconds=1.0)
        return self._connection

    def _lose(self, error: KvpoolError) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
            _log.warning("lender lost", extra={"address": self.address, "reason": error.reason, "error": str(error)})
            self._wake()

    def _read(self) -> None:
        """Enforces the fences that the lender has sent, and notices when the connection has ended."""
        connection = self._connection
        if connection:
            try:
                self._enforce(connection, connection.take_fences())
            except KvpoolError as error:
                self._lose(error)

    def _enforce(self, connection: Connection, fences: Iterable[lending_pb2.LendFence]) -> None:
        """Enforces fences, and answers the newest if no step that it excludes is in flight."""
        for fence in fences:
            if not self._mapping:
                raise InvalidArgumentError("message", "a fence before the memory is mapped", reason="MALFORMED")
            if not fence.epoch:
                self._fence.end()
            elif fence.epoch >= self._fence.epoch:
                self._begin(fence.epoch)
                self._fence.narrow(fence.last_session_number, fence.live_session_numbers)
            self._wake()  # the thread finishes steps on a device
        if connection.unanswered_fence and self._fence.is_drained:
            connection.answer_fence(self._timeout_seconds)

    def _begin(self, epoch: int) -> None:
        """Begins an epoch, unless it has begun."""
        if epoch != self._fence.epoch:
            self._newest_epoch = max(epoch, self._newest_epoch)
            self._fence.begin(epoch)
            self._fence.open(epoch)
            self._sessions = {lease for lease in self._sessions if lease.epoch == epoch}

    def _wake(self) -> None:
        """Wakes the thread. Needs no lock."""
        with contextlib.suppress(OSError):  # it is awake already, or has ended
            self._waker.send(b"w")

    # The rest runs in the thread, without the lock unless it takes it.

    def _run(self) -> None:
        backoff = Backoff(0.05, 0.5)
        while not self._final_error:
            connection = self._connection
            if not connection:
                if self._reconnect():
                    backoff.reset()
                else:
                    self._wait(None, backoff.next())
                continue
            # A step may be launched after the thread has looked for it.
            self._wait(connection, None if self._fence.is_drained else _LAUNCH_SECONDS)
            with self._lock:
                self._read()
            if not self._fence.is_drained:
                self._finish_launched_steps()

    def _finish_launched_steps(self) -> None:
        """Finishes steps on the device. After an error of the device they stay in flight."""
        try:
            if self._finish_steps:
                self._finish_steps()
        except Exception:  # noqa: BLE001 - of the device; the thread goes on
            _log.exception("steps not finished", extra={"address": self.address})

    def _wait(self, connection: Connection | None, seconds: float | None) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        with self._lock:
            if connection and connection is self._connection:
                poll.register(connection, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)
        self._take_wakes()

    def _take_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _connect(self) -> tuple[Connection, lending_pb2.LendingOffer]:
        connection = Connection(self.address, self._timeout_seconds)
        try:
            return connection, connection.hello(self._hello, self._timeout_seconds)
        except KvpoolError:
            connection.close()
            raise

    def _reconnect(self) -> bool:
        """Tries to restore the connection. Returns whether it is there, or will never be."""
        try:
            connection, _ = self._connect()
        except KvpoolError as error:
            return self._give_up(error)
        try:
            wait = partial(self._wait_for_memory, connection)
            mapping, epoch = self._mapping, 0
            if mapping and mapping.memory.is_mapped:
                epoch = ask_again(connection, mapping, wait)
            elif mapping:  # before the sessions are named: the pool may wait for this
                request_unmap(connection)
            refused = self._bind_again(connection)
        except KvpoolError as error:
            connection.close()
            return self._give_up(error)
        with self._lock:
            if self._final_error:
                connection.close()
                return True
            if mapping and bool(epoch) != mapping.memory.is_mapped:  # it was unmapped meanwhile
                connection.close()
                return False
            self._connection = connection
            self._sessions -= refused
            if epoch:
                self._begin(epoch)
            self._read()  # a fence may have come with the answers
            self._reconnected.notify_all()
        _log.info("lender found again", extra={"address": self.address})
        return True

    def _wait_for_memory(self, connection: Connection, deadline: float) -> None:
        """Waits for data. Answers fences, as the pool may wait for the answers, and this process for the pool."""
        with self._lock:
            self._check_final()
            self._enforce(connection, connection.take_received_fences())
        if not self._fence.is_drained:
            self._finish_launched_steps()
        connection.wait(deadline, self._woken)
        self._take_wakes()

    def _bind_again(self, connection: Connection) -> set[TableLease]:
        """Names the sessions. Returns those that the lender refuses; the next step names them again, and fails."""
        refused = set()
        for lease in tuple(self._sessions):  # safe without the lock: `_bind` adds one only while there is a connection
            try:
                request_bind(connection, lease, self._timeout_seconds)
            except KvpoolError as error:
                if connection.has_failed:
                    raise
                if error.reason == "NOT_READY":
                    raise UnavailableError(error.reason, str(error), retry_seconds=1.0) from error
                fields = {"address": self.address, "session": lease.session_number, "reason": error.reason}
                _log.warning("session refused by the lender", extra=fields)
                refused.add(lease)
        return refused

    def _give_up(self, error: KvpoolError) -> bool:
        """Stops for good if the lender refuses. Returns whether it does."""
        if isinstance(error, UnavailableError | DeadlineError) or error.retry_seconds is not None:
            return False
        final = error if isinstance(error, StaleTablesError) else StaleTablesError("LENDER_REFUSES", str(error))
        with self._lock:
            if not self._final_error:
                _log.error("memory lost", extra={"address": self.address, "reason": error.reason, "error": str(error)})
            self._stop(final)
        return True


class LentMemory:
    """Memory of a rank that this process mapped. Thread-safe.

    Attributes:
        buffer: The memory, int8 (size_bytes,), as earlier engines left it. Write to blocks of the session only.
        host: The blocks in host memory, int8 (num_host_blocks, slot_bytes), as earlier engines left them: row i is the
            block with id num_blocks + i. None if the pool has none.
        num_blocks: Number of blocks of the pool, the null block included.
        epoch: Epoch of the pool when the memory was mapped.
        lender: The connection to the lender.
    """

    def __init__(self, lender: LenderClient, mapping: Mapping) -> None:
        """Use `LenderClient.map`."""
        mapped = mapping.mapped or lending_pb2.Mapped()
        self.lender: Final = lender
        self.buffer: Final = mapping.memory.buffer
        self.host: Final = mapping.host.buffer.view(-1, mapping.declared.block_bytes) if mapping.host else None
        self.num_blocks: Final = mapped.num_blocks
        self.epoch: Final = mapped.epoch

    def step(self, lease: TableLease) -> StepTicket:
        """Admits a step before its launch; it is in flight until its ticket is done.

        Costs microseconds and no message, except before the first step of a session, which is named to the lender.

        Args:
            lease: The scheduler's `Session.table_lease`, sent with the block tables.

        Raises:
            StaleTablesError: The step must not run: its session has ended, or the memory is lost.
            WrongStateError: This process was forked after it connected (FORKED).
            KvpoolError: The lender refuses the session; or it is gone, and the session is new.
        """
        return self.lender.step(lease)

    def bind(self, lease: TableLease) -> None:
        """Names a session before its first step. See `LenderClient.bind`."""
        self.lender.bind(lease)

    def unmap(self) -> None:
        """Unmaps the memory until `map_again`. The sessions go on, and other processes use the memory.

        The addresses of `buffer`, `host` and their views stay reserved, and must not be used. Without the lender it
        works alike: the lender learns of it when it is there again. Repeats do nothing.

        Raises:
            WrongStateError: A step is in flight (STEPS_IN_FLIGHT); or this process was forked (FORKED).
            StaleTablesError: The memory is lost.
        """
        self.lender.unmap()

    def map_again(self) -> None:
        """Maps the memory again, at the addresses where it was. Repeats do nothing.

        Raises:
            StaleTablesError: The lender has other memory (MEMORY_CHANGED), so that no step runs any more.
            KvpoolError: The lender refuses, does not answer in time, or is gone; the memory stays unmapped.
        """
        self.lender.map_again()

    def close(self) -> None:
        """Ends the connection. No step runs afterwards; the memory stays mapped as long as views of it exist."""
        self.lender.close()
