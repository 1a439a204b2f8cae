"""Engines that share memory and lose nothing when processes die: `python -m examples.reference_engine.sharing`.

A server, a worker that lends the memory of one rank, and reference engines, each in a process of its own. Exits with
status 1 if a token is wrong, or something that was cached is lost.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import click

from kvpool.cli.tables import print_facts
from kvpool.client import Client, connect
from kvpool.replay import ChildError
from kvpool.replay.children import own_server

_POOL: Final = "lent"
_WAIT_SECONDS: Final = 60.0
_ENGINE: Final = (sys.executable, "-m", "examples.reference_engine", "--pool", _POOL, "--json")
_SCRIPTS: Final = Path(sys.executable).parent


class Place:
    """A server, a lender, and the folder that its memory survives in."""

    def __init__(self, stack: ExitStack, server: str, folder: Path, device: str) -> None:
        """Starts the lender."""
        self.server = server
        self.device = device
        self.memory = f"unix:{folder}/memory"
        self._stack = stack
        self._folder = folder
        self.start_lender()

    def start_lender(self) -> None:
        """Starts the lender, at first or after it was killed."""
        command = [str(_SCRIPTS / "kvpool"), "worker", "--server", self.server, "--pool", _POOL, "--rank", "0"]
        command += ["--device", self.device, "--memory", "8MiB", "--lend", self.memory]
        command += ["--lend-folder", str(self._folder), "--log-level", "error"]
        self.lender = self._stack.enter_context(_process(command))
        _wait_until(lambda: Path(self.memory.removeprefix("unix:")).is_socket(), "the worker lends", self.lender)

    def run(self) -> dict[str, int]:
        """Runs an engine to its end; returns what it counted."""
        command = [*_ENGINE, *self._options()]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - this program's
        if done.returncode:
            raise ChildError(f"an engine ended with status {done.returncode}: {done.stdout}")
        counts: dict[str, int] = json.loads(done.stdout)
        return counts

    def kill_an_engine(self, client: Client) -> float:
        """Kills all processes of an engine while it generates; returns the seconds until its blocks are free."""
        before = client.get_pool(_POOL).free_blocks
        with _process([*_ENGINE, *self._options(), "--requests", "10000"]) as engine:
            _wait_until(lambda: client.get_pool(_POOL).free_blocks < before, "the engine generates", engine)
            os.killpg(engine.pid, signal.SIGKILL)
            killed = time.monotonic()
            _wait_until(lambda: client.get_pool(_POOL).free_blocks == before, "the blocks are free")
        return time.monotonic() - killed

    def kill_the_lender(self) -> None:
        """Kills the lender, and starts it again."""
        self.lender.kill()
        self.lender.wait()
        Path(self.memory.removeprefix("unix:")).unlink()
        self.start_lender()

    def _options(self) -> tuple[str, ...]:
        return "--server", self.server, "--memory", self.memory, "--device", self.device


@click.command()
@click.option("--device", default="cpu", help="Device of the memory: cpu, or cuda:N.")
@click.pass_context
def main(ctx: click.Context, device: str) -> None:
    """Run engines on lent memory, and kill some."""
    click.echo("A worker lends the memory of a rank. Engines map it, one after the other, with the same prompts.")
    with ExitStack() as stack:
        server = stack.enter_context(own_server())
        client = stack.enter_context(connect(server))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvpool-", dir=_folder())))
        place = Place(stack, server, folder, device)
        first, second = place.run(), place.run()
        epoch = client.get_pool(_POOL).epoch
        free_seconds = place.kill_an_engine(client)
        place.kill_the_lender()
        last = place.run()
        pool = client.get_pool(_POOL)
    rows = [
        ("first engine: prompt tokens found in the cache", _found(first)),
        ("second engine, on the same memory", _found(second)),
        ("an engine is killed while it generates: blocks free after", f"{free_seconds * 1000:,.0f} ms"),
        ("the worker is killed and started again: epoch", f"{epoch}, then {pool.epoch}"),
        ("third engine, after both", _found(last)),
    ]
    print_facts("engines on lent memory, with the tokens of a model without a cache", rows)
    is_warm = last["hit_tokens"] >= second["hit_tokens"] > first["hit_tokens"]
    ctx.exit(0 if is_warm and pool.epoch == epoch else 1)


def _found(counts: dict[str, int]) -> str:
    return f"{counts['hit_tokens']:,} of {counts['input_tokens']:,}"


def _folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a private folder in it


@contextmanager
def _process(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a command in a process group of its own; ends the group, and a worker frees its memory."""
    process = subprocess.Popen(  # noqa: S603 - this program's commands
        command, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _wait_until(is_met: Callable[[], bool], what: str, process: "subprocess.Popen[bytes] | None" = None) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_met():
        if process and process.poll() is not None:
            raise click.ClickException(f"a process ended with status {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise click.ClickException(f"not within {_WAIT_SECONDS:g} s: {what}")
        time.sleep(0.001)  # the time until it is met is printed in milliseconds


if __name__ == "__main__":
    main()
