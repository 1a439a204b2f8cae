"""Two real servers of a shard, on loopback addresses of their own, so that a restarted server finds its ports free."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import grpc

from kvpool.v1 import directory_pb2, directory_pb2_grpc
from support.hosts import Host
from support.server import KVPOOL, CommandLineServer
from support.waiting import DEADLINE_SECONDS
from support.workers import Network

_PORT, _REPLICATION_PORT = 7000, 7001
_ASK_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.02

_T = TypeVar("_T")


class PairServer:
    """One server of a shard, over all its processes.

    Args:
        host: Its host, on which no other process listens at its ports.
        folder: Folder of its journal.
        options: More options of `kvpool serve`.
        is_cuttable: Whether the connections of its standby can be cut.

    Attributes:
        address: Address for clients.
        host: Its host.
        link: A network in front of the address for standbys that a test can cut; None if there is none.
        processes: Its processes, the newest one last.
    """

    def __init__(self, host: Host, folder: Path, options: Sequence[str], *, is_cuttable: bool) -> None:
        self.host = host
        self.address = f"{host.address}:{_PORT}"
        self.folder = folder
        listen = f"{host.address}:{_REPLICATION_PORT}"
        self.link = Network(listen) if is_cuttable else None
        self.processes: list[CommandLineServer] = []
        self._options = ["--journal", str(folder), "--replication-listen", listen]
        if self.link:
            self._options += ["--replication-advertise", self.link.address]
        self._options += options

    @property
    def process(self) -> CommandLineServer:
        """The newest process."""
        return self.processes[-1]

    @property
    def is_alive(self) -> bool:
        """Whether a process runs, paused or not."""
        return bool(self.processes) and self.process.is_alive

    def start(
        self,
        command: Sequence[str] = KVPOOL,
        environment: Mapping[str, str] = MappingProxyType({}),
        faults: str = "",
    ) -> CommandLineServer:
        """Starts a process; see `CommandLineServer`."""
        self.processes.append(
            CommandLineServer(
                self.address,
                options=self._options,
                command=command,
                prefix=self.host.prefix,
                environment=environment,
                faults=faults,
                waits=False,
            )
        )
        return self.process

    def kill(self) -> None:
        """Kills the process, paused or not."""
        if self.processes:
            self.process.kill()

    def pause(self) -> None:
        """Pauses the process. Its connections stay open."""
        self.process.pause()

    def resume(self) -> None:
        """Continues after `pause`."""
        self.process.resume()

    def shard(self) -> directory_pb2.Shard | None:
        """What the server says of its shard; None if it does not answer."""
        try:
            with grpc.insecure_channel(self.address) as channel:
                stub = directory_pb2_grpc.DirectoryServiceStub(channel)
                return stub.GetShard(directory_pb2.GetShardRequest(), timeout=_ASK_SECONDS).shard
        except grpc.RpcError:
            return None


class Pair:
    """Two servers of a shard.

    Args:
        folder: Folder of their journals.
        url: The directory.
        options: More options of `kvpool serve`.
        is_cuttable: Whether the connections between the servers can be cut.
        hosts: Hosts for the servers; without them, they are on this one.

    Attributes:
        servers: The two servers, which do not run yet.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        options: Sequence[str] = (),
        *,
        is_cuttable: bool = False,
        hosts: Sequence[Host] = (),
    ) -> None:
        all_options = ["--cluster", url, "--grace-seconds", "2", *options]
        if hosts:
            all_options += ["--allow-plaintext", "grpc", "--allow-plaintext", "replication"]
        net = ".".join(["127", *(str(random.randint(2, 250)) for _ in range(2))])  # noqa: S311 - no secret
        self.servers = [
            PairServer(host, folder / f"journal-{i}", all_options, is_cuttable=is_cuttable)
            for i, host in enumerate(hosts or (Host(f"{net}.1"), Host(f"{net}.2")), start=1)
        ]

    @property
    def seeds(self) -> str:
        """Addresses of the servers for clients."""
        return ",".join(server.address for server in self.servers)

    def start(self) -> None:
        """Starts the pair and waits until they are in sync."""
        for server in self.servers:
            server.start()
        self.wait_in_sync()

    def wait_in_sync(self, meanwhile: Callable[[], object] = lambda: None) -> int:
        """Waits until both servers report the same primary and each other as in sync. Returns the term.

        Args:
            meanwhile: Called in each round.
        """

        def find() -> int | None:
            meanwhile()
            first, second = (server.shard() for server in self.servers)
            is_same = first is not None and first == second and len(first.members) == 2
            return first.term if first and is_same else None

        return self.wait_for(find, "both in sync")

    def primary(self, meanwhile: Callable[[], object] = lambda: None) -> PairServer:
        """Waits until a running server says that it is the primary, and returns the one of the highest term.

        Args:
            meanwhile: Called in each round.
        """

        def find() -> PairServer | None:
            meanwhile()
            found = []
            for server in self.servers:
                shard = server.shard() if server.is_alive else None
                if shard and server.address in shard.primary_addresses:
                    found.append((shard.term, server))
            return max(found, key=lambda each: each[0])[1] if found else None

        return self.wait_for(find, "a primary")

    def standby(self) -> PairServer:
        """The server that is not the primary."""
        return self.other(self.primary())

    def other(self, server: PairServer) -> PairServer:
        """The other server of the two."""
        return self.servers[1 - self.servers.index(server)]

    def close(self) -> None:
        """Kills all."""
        for server in self.servers:
            server.kill()
            if server.link:
                server.link.close()

    def wait_for(self, find: Callable[[], _T | None], what: str) -> _T:
        """Waits until something is found, and returns it."""
        due = time.monotonic() + DEADLINE_SECONDS
        while (found := find()) is None:
            logs = ["".join(line for each in server.processes for line in each.lines) for server in self.servers]
            assert time.monotonic() < due, f"no {what}:\n" + "\n\n".join(logs)
            time.sleep(_POLL_SECONDS)
        return found
