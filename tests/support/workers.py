"""Real worker processes, and a network between them and their server that can be cut."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from support import processes
from support.logging_process import LoggingProcess

LAYER = {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}
LAYERS = {f"layer.{i}": LAYER for i in range(2)}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4


def ready(epoch: int | str) -> str:
    """Matches the log line of a ready rank, in either format."""
    return f'rank ready.*epoch(=|": ){epoch}\\b'


class WorkerProcess(LoggingProcess):
    """A `kvpool worker` in its own process."""

    def __init__(self, server: str, rank: int, world_size: int, layers: Path, *flags: str, blocks: int = 100) -> None:
        command = [processes.KVPOOL, "worker", "--server", server, "--pool", "m"]
        command += ["--rank", str(rank), "--world-size", str(world_size), "--tp", str(world_size)]
        command += ["--layers", str(layers), "--max-model-len", "512", "--device", "cpu"]
        super().__init__(*command, "--memory", f"{blocks * BLOCK_BYTES}B", *flags)


@contextlib.contextmanager
def worker_processes(folder: Path) -> Iterator["Workers"]:
    """Starts workers on demand; kills those that still run at the end."""
    path = folder / "layers.json"
    path.write_text(json.dumps({"layers": LAYERS}))
    workers = Workers(path)
    try:
        yield workers
    finally:
        for worker in workers.started:
            worker.kill()


class Workers:
    """The workers of a test.

    Attributes:
        started: All that were started.
    """

    def __init__(self, layers: Path) -> None:
        self._layers = layers
        self.started: list[WorkerProcess] = []

    def start(self, server: str, rank: int, world_size: int, *flags: str, blocks: int = 100) -> WorkerProcess:
        """Starts a rank."""
        worker = WorkerProcess(server, rank, world_size, self._layers, *flags, blocks=blocks)
        self.started.append(worker)
        return worker

    def form(self, server: str, world_size: int, *flags: str) -> list[WorkerProcess]:
        """Starts all ranks and waits until they are ready."""
        workers = [self.start(server, rank, world_size, *flags) for rank in range(world_size)]
        for worker in workers:
            worker.wait_for(ready(1))
        return workers


class Network:
    """A TCP proxy in front of a server. While cut, it neither drops nor delivers bytes, like a pulled cable.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._to_server, self._to_client = threading.Event(), threading.Event()
        self.heal()
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cuts the connections silently: nothing gets through."""
        self.cut_to_server()
        self.cut_to_client()

    def cut_to_server(self) -> None:
        """Cuts one direction: the server hears nothing."""
        self._to_server.clear()

    def cut_to_client(self) -> None:
        """Cuts one direction: the clients hear nothing."""
        self._to_client.clear()

    def heal(self) -> None:
        """Restores the connections: delayed bytes arrive."""
        self._to_server.set()
        self._to_client.set()

    def close(self) -> None:
        """Ends all connections."""
        self.heal()
        for each in (self._listener, *self._sockets.copy()):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._to_server.wait()
                self._to_client.wait()  # a connection needs both directions
                try:
                    far = socket.create_connection(self._server)
                except ConnectionRefusedError:  # the server is down, so the client's connection ends too
                    near.close()
                    continue
                threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        """Forwards both ways until both ends are closed."""
        self._sockets.update((near, far))
        with near, far:
            answers = threading.Thread(target=self._forward, args=(far, near, self._to_client), daemon=True)
            answers.start()
            self._forward(near, far, self._to_server)
            answers.join()
        self._sockets.difference_update((near, far))

    def _forward(self, source: socket.socket, sink: socket.socket, flows: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                flows.wait()
                sink.sendall(data)
        flows.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
