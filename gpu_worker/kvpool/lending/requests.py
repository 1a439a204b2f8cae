"""The requests of a process that maps memory."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvpool.core.errors import KvpoolError, UnavailableError, WrongStateError
from kvpool.core.ids import TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.lending.connection import Connection
from kvpool.lending.fence import StaleTablesError
from kvpool.lending.mapped_memory import HostMemory, MappedMemory, reserve_host_memory
from kvpool.lending.memory_file import close_all
from kvpool.v1 import lending_pb2, link_pb2
from kvpool.wire.backoff import Backoff
from kvpool.wire.errors import DeadlineError
from kvpool.wire.ranks import declared_to_proto

_UNMAP_SECONDS: Final = 1.0
"""How long a process that gives memory back waits for the lender, before it tries again."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """What a process maps.

    Attributes:
        declared: The layout of the memory.
        timeout_seconds: How long to wait for the lender.
        memory: Where it is mapped.
        weights_bytes: What the engine's weights take of the device; 0 for unknown.
        mapped: What the lender said of the memory; None until it is mapped for the first time.
        host: Where the host memory is mapped; None if the pool has no blocks there.
    """

    declared: DeclaredMemory
    timeout_seconds: float
    memory: MappedMemory
    weights_bytes: int
    mapped: lending_pb2.Mapped | None = None
    host: HostMemory | None = None

    def with_answer(self, mapped: lending_pb2.Mapped, device: str) -> "Mapping":
        """Returns the mapping after a checked answer of the lender. Reserves addresses for host memory once.

        Raises:
            WrongStateError: No range is free.
        """
        host = self.host
        if mapped.num_host_blocks and host is None:
            host = reserve_host_memory(device, mapped.num_host_blocks * self.declared.block_bytes)
        return replace(self, mapped=mapped, host=host)

    def map(self, descriptors: Sequence[int]) -> None:
        """Maps what the lender sent. Raises as `MappedMemory.map`; nothing is mapped then."""
        try:
            self.memory.map(descriptors[0])
            if self.host:
                self.host.map(descriptors[1])
        except BaseException:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Unmaps all memory."""
        self.memory.unmap()
        if self.host:
            self.host.unmap()


def request_memory(
    connection: Connection, mapping: Mapping, wait: Callable[[float], None] | None = None
) -> tuple[lending_pb2.Mapped, tuple[int, ...]]:
    """Asks for the memory. Returns the answer and the descriptors, which the caller closes. See `Connection.map`."""
    request = lending_pb2.Map(declared=declared_to_proto(mapping.declared), weights_bytes=mapping.weights_bytes)
    return connection.map(request, mapping.timeout_seconds, wait)


def ask_again(connection: Connection, mapping: Mapping, wait: Callable[[float], None]) -> int:
    """Asks for the memory that is mapped already. Returns the epoch of the pool. See `Connection.map`.

    Raises:
        StaleTablesError: The lender has other memory.
        KvpoolError: The lender refuses, does not answer in time, or is gone.
    """
    mapped, descriptors = request_memory(connection, mapping, wait)
    close_all(descriptors)
    try:
        check_mapped(mapped, mapping)
    except KvpoolError:
        with contextlib.suppress(KvpoolError):  # the lender counts this process as mapping the other memory
            request_unmap(connection)
        raise
    return mapped.epoch


def request_bind(connection: Connection, lease: TableLease, timeout_seconds: float) -> None:
    """Names a session."""
    bind = lending_pb2.Bind(epoch=lease.epoch, session_number=lease.session_number)
    connection.request(lending_pb2.LendRequest(bind=bind), "bound", timeout_seconds)


def request_unmap(connection: Connection) -> None:
    """Tells the lender that this process has unmapped the memory."""
    connection.request(lending_pb2.LendRequest(unmap=lending_pb2.Unmap()), "unmapped", _UNMAP_SECONDS)


def give_back(address: str, hello: link_pb2.LinkHello, timeout_seconds: float) -> None:
    """Gives the memory back on a connection of its own; tries until the lender is there. For a thread of its own.

    Otherwise the lender would wait for this process until it exits, before it answers the plan of another epoch.
    """
    backoff = Backoff(0.05, 0.5)
    while True:
        try:
            with contextlib.closing(Connection(address, timeout_seconds)) as connection:
                connection.hello(hello, timeout_seconds)
                request_unmap(connection)
        except (UnavailableError, DeadlineError):
            time.sleep(backoff.next())  # a socket does not report when somebody listens on it again
        except KvpoolError:
            return  # another lender, which refuses the process and does not wait for it
        else:
            return


def check_mapped(mapped: lending_pb2.Mapped, mapping: Mapping) -> None:
    """Checks the memory that a lender sends.

    Raises:
        WrongStateError: It has another size than declared.
        StaleTablesError: It is not the memory that this process has mapped before.
    """
    declared = mapping.declared
    sizes = {"size_bytes": declared.size_bytes, "num_blocks": declared.config.num_blocks}
    for name, own in sizes.items():
        theirs = getattr(mapped, name)
        if theirs != own:
            raise WrongStateError("SIZE_DIFFERS", f"the lender has {theirs}, and the engine needs {own}", field=name)
    before = mapping.mapped or mapped
    if (before.memory_id, before.num_host_blocks) != (mapped.memory_id, mapped.num_host_blocks):
        message = "the lender has other memory now, and what this process mapped is lost"
        raise StaleTablesError("MEMORY_CHANGED", message)
