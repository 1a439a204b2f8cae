"""Real lenders, and processes of engines that map their memory."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, PoolConfig
from kvpool.v1 import lending_pb2, link_pb2
from kvpool.wire import link
from kvpool.wire.frames import encode_frame
from support import processes
from support.logging_process import LoggingProcess
from support.raw_link import RawLink

NUM_BLOCKS = 32
BLOCK_SIZE = 4
LAYER = FullAttentionSpec(BLOCK_SIZE, 1, 8, "float32")
BLOCK_BYTES = LAYER.page_size_bytes
CONFIG = PoolConfig(
    PoolName("m"), NUM_BLOCKS, 64, (KVCacheGroup(LAYER, ("layer.0",)),), hash_scheme=HashScheme(none_hash=b"n" * 32)
)
DECLARED = DeclaredMemory(CONFIG, NUM_BLOCKS * BLOCK_BYTES, (("dtype", "float32"), ("model", "llama")))


def declared_with(num_blocks: int) -> DeclaredMemory:
    """The same layout with another number of blocks."""
    config = replace(CONFIG, num_blocks=num_blocks)
    return replace(DECLARED, config=config, size_bytes=num_blocks * BLOCK_BYTES)


class LenderProcess(LoggingProcess):
    """A `kvpool worker --lend` in its own process.

    Attributes:
        address: Socket of the lender.
        folder: Folder of the memory of all ranks.
    """

    def __init__(  # noqa: PLR0913 - the options of the command
        self,
        server: str,
        folder: Path,
        rank: int = 0,
        world_size: int = 1,
        *flags: str,
        pool: str = "m",
        waits: bool = True,
    ) -> None:
        self.address = f"unix:{folder / f'lender-{rank}'}"
        self.folder = folder
        command = [processes.KVPOOL, "worker", "--server", server, "--pool", pool]
        command += ["--rank", str(rank), "--world-size", str(world_size), "--device", "cpu", "--lend", self.address]
        command += ["--memory", f"{NUM_BLOCKS * BLOCK_BYTES}B", "--lend-folder", str(folder), *flags]
        super().__init__(*command)
        if waits:
            self.wait_for("lending")


@contextlib.contextmanager
def lender_process(
    server: str, rank: int = 0, world_size: int = 1, *flags: str, pool: str = "m"
) -> Iterator[LenderProcess]:
    """Runs a lender; kills it at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        lender = LenderProcess(server, Path(folder), rank, world_size, *flags, pool=pool)
        with lender:
            yield lender


def lending_hello(token: str = "", **fields: str) -> bytes:
    """The frame of a hello for lent memory; `fields` replace its fields."""
    lending = lending_pb2.LendingHello(**{"pool_name": "m", "client_id": "raw", **fields})
    return link.hello(link_pb2.LinkHello(token=token, lending=lending))


def lend_request(**message: Any) -> bytes:
    """The frame of a request to a lender."""
    return encode_frame(link.Kind.REQUEST, lending_pb2.LendRequest(**message).SerializeToString())


def introduced(address: str, token: str = "", **fields: str) -> RawLink:
    """A link to a lender, on which this process has introduced itself."""
    connection = RawLink(address, lending_hello(token, **fields))
    connection.welcome()
    return connection


class EngineProcess(LoggingProcess):
    """A process that maps memory, opens a session, and runs steps; see engine_program.py.

    Attributes:
        started: Its first answer.
        session_number: Number of its session.
    """

    def __init__(
        self,
        server: str,
        *lenders: str,
        num_blocks: int = NUM_BLOCKS,
        lease_seconds: float = 600.0,
    ) -> None:
        settings = {"server": server, "lenders": lenders, "num_blocks": num_blocks, "lease_seconds": lease_seconds}
        program = (processes.PYTHON, "-m", "support.engine_program", json.dumps(settings))
        super().__init__(*program, stdin=processes.PIPE, stdout=processes.PIPE)
        self.started = self.read()
        self.session_number: int = self.started["session_number"]

    def __call__(self, do: str, *arguments: Any) -> Any:
        """Has the process do something, and returns its answer."""
        self.send(do, *arguments)
        return self.read()

    def send(self, do: str, *arguments: Any) -> None:
        """Has the process do something."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([do, *arguments]) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """Reads the answer to the last `send`."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def exit(self) -> None:
        """Has the process close its session and exit."""
        assert self.process.stdin
        self.process.stdin.close()
        self.end()


@contextlib.contextmanager
def engine(server: str, *lenders: str, **options: Any) -> Iterator[EngineProcess]:
    """Runs an engine's process; kills it at the end."""
    with EngineProcess(server, *lenders, **options) as process:
        yield process
