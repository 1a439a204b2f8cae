"""Child processes that end with their parent, and a server as such a process.

A child holds one end of a pipe. When the parent ends, however it ends, the pipe closes and the child ends itself.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

from kvpool.replay import ChildError
from kvpool.server.app import serve
from kvpool.server.config import ServerConfig

Pipe: TypeAlias = "Connection[Any, Any]"

Serve: TypeAlias = Callable[[tuple[str, ...], Callable[[list[str]], None]], Coroutine[Any, Any, None]]
"""What a server process runs. Arguments: the addresses to listen on, and a function to call with the bound ones."""

CONTEXT: Final = multiprocessing.get_context("spawn")
STOP_SECONDS: Final = 15.0
LOOPBACK: Final = "127.0.0.1:0"
"""A free port that only this machine reaches."""


@dataclass(frozen=True, slots=True)
class ServerChild:
    """A server in a process of its own.

    Attributes:
        addresses: The addresses it listens on.
        pid: Its process id.
    """

    addresses: tuple[str, ...]
    pid: int


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Runs a server in a child process, on a unix socket; yields its address.

    Raises:
        ChildError: The server did not start.
    """
    with server_child(serve_pools) as server:
        yield server.addresses[0]


@contextlib.contextmanager
def server_child(serve_there: Serve, *more_addresses: str) -> Iterator[ServerChild]:
    """Runs a server in a child process, on a unix socket.

    Args:
        serve_there: The function that the child runs; at the top level of a module, so that it can be pickled.
        more_addresses: Addresses to listen on besides the socket.

    Raises:
        ChildError: The server did not start.
    """
    with TemporaryDirectory(prefix="kvpool-") as folder:
        addresses = (f"unix:{Path(folder) / 'socket'}", *more_addresses)
        with child_process("kvpool-server", _run, serve_there, addresses) as (child, pipe):
            yield ServerChild(_await_ready(pipe), child.pid or 0)


@contextlib.contextmanager
def child_process(name: str, target: Callable[..., None], *arguments: object) -> Iterator[tuple[SpawnProcess, Pipe]]:
    """Runs a function in a child process, which is terminated at the end of the block.

    Args:
        name: Name of the process.
        target: The function, at the top level of a module. Its last argument is the child's end of a pipe.
        arguments: The other arguments.

    Yields:
        The process, and this process's end of the pipe.
    """
    here, there = CONTEXT.Pipe()
    child = CONTEXT.Process(target=target, args=(*arguments, there), name=name, daemon=True)
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.terminate()
        child.join(STOP_SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
        here.close()


async def serve_pools(addresses: tuple[str, ...], ready: Callable[[list[str]], None]) -> None:
    """Serves pools with the default settings of `kvpool serve`."""
    await serve(ServerConfig(addresses=addresses, grace_seconds=1.0), ready)


def end_with_parent(pipe: Pipe) -> None:
    """Sends this process SIGTERM when the parent's end of the pipe is closed."""

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()  # the parent sends nothing: this returns when it has ended
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _await_ready(pipe: Pipe) -> tuple[str, ...]:
    try:
        answer: tuple[str, ...] | str = pipe.recv()
    except EOFError:
        raise ChildError("the server process ended before it listened") from None
    if isinstance(answer, str):
        raise ChildError(f"the server could not start: {answer}")
    return answer


def _run(serve_there: Serve, addresses: tuple[str, ...], pipe: Pipe) -> None:
    logging.basicConfig(level=logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C

    def ready(bound: list[str]) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.send(tuple(bound))
        end_with_parent(pipe)

    try:
        asyncio.run(serve_there(addresses, ready))
    except OSError as error:
        pipe.send(str(error))
