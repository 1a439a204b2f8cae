"""`kvpool worker --lend`: a rank whose memory engines declare and map."""

import asyncio
import contextlib
import logging
import signal
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from kvpool.cli.endpoints import Endpoints
from kvpool.cli.model import ModelFlags, byte_size
from kvpool.cli.options import file_option, together, usage_errors
from kvpool.client.connection import connect_as
from kvpool.core.errors import KvpoolError
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.wire.address import check_address
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.secret_file import read_secret

if TYPE_CHECKING:
    from kvpool.gpu_worker.lent_rank import LentRank

_log = logging.getLogger("kvpool.worker")
lending_options: Final = together(
    click.option(
        "--lend",
        metavar="unix:PATH",
        help="Lend the memory to engines on this machine: they connect here and declare its layout. Needs no model.",
    ),
    file_option("--lend-token-file", "With --lend: file of a secret that engines must present."),
    click.option(
        "--lend-folder",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        default="/dev/shm",  # noqa: S108 - the folder in it is private
        metavar="FOLDER",
        help="With --lend: file system in memory for the KV cache on CPU, and for --host-memory.",
    ),
    click.option(
        "--host-memory",
        type=byte_size,
        metavar="SIZE",
        default="0",
        help="With --lend: host memory beside --memory that keeps blocks which are evicted, such as 64GiB.",
    ),
    click.option(
        "--keep-memory",
        is_flag=True,
        help="With --lend: keep the memory at SIGTERM, for the next start. Default: free it.",
    ),
)
"""Adds the options of `LendingFlags`."""

_LOOK_SECONDS: Final = 1.0
"""How long a lender waits at its start for what the server knows of its pool."""
_PLANNED: Final = ("model", "reuse_order", "no_caching", "events", "layout", *(f.name for f in fields(ModelFlags)))
"""Options that engines declare instead."""


@dataclass(frozen=True, slots=True)
class LendingFlags:
    """Values of `lending_options`; each attribute has the name of its option."""

    lend: str | None
    lend_token_file: Path | None
    lend_folder: Path
    host_memory: int
    keep_memory: bool

    def __post_init__(self) -> None:
        if self.lend is None:
            if self.lend_token_file or self.keep_memory or self.host_memory:
                raise click.UsageError("--lend-token-file, --keep-memory and --host-memory need --lend")
            return
        with usage_errors("--lend: "):
            check_address(self.lend)
            if not self.lend.startswith("unix:"):
                raise ValueError(f"{self.lend!r} is not a unix socket: file descriptors cannot leave the machine")

    def refuse_planned(self, context: click.Context) -> None:
        """Raises UsageError if an option is given that engines declare."""
        for param in context.command.params:
            if param.name in _PLANNED and context.get_parameter_source(param.name) is not ParameterSource.DEFAULT:
                raise click.UsageError(f"{param.opts[0]} cannot be combined with --lend: engines declare it")

    def settings(self, options: dict[str, Any], access: ClientCredentials) -> WorkerSettings:
        """The settings of the rank, from the other options of `kvpool worker`."""
        options = {name: value for name, value in options.items() if name not in _PLANNED}
        options["memory_bytes"] = options.pop("memory")
        options["reserve_bytes"] = options.pop("reserve")
        options["host_memory_bytes"] = self.host_memory
        if options["gpu_memory_utilization"] is None:
            del options["gpu_memory_utilization"]
        options["world_size"] = options["world_size"] or 1
        return WorkerSettings(options=RankGroupOptions(max_model_len=1), access=access, **options)

    def run(self, settings: WorkerSettings, endpoints: Endpoints) -> None:
        """Lends until SIGTERM or SIGINT.

        Raises:
            KvpoolError: The device lacks memory, another process lends the same rank, or the socket cannot be made.
            click.ClickException: The token file cannot be read.
        """
        from kvpool.gpu_worker.lent_rank import LentRank, memory_folder  # noqa: PLC0415 - torch is optional
        from kvpool.gpu_worker.worker_metrics import WorkerCollector  # noqa: PLC0415 - as above
        from kvpool.lending.lending_server import listening  # noqa: PLC0415 - as above

        token = self._token()
        with (
            endpoints.health_served() as on_status,
            memory_folder(settings, self.lend_folder) as folder,
            listening(self._path) as listener,
        ):
            _warn_if_declared(settings)
            rank = LentRank(settings, folder, on_status)
            with endpoints.metrics_served(WorkerCollector(rank, settings)):
                asyncio.run(self._lend(listener, rank, token))

    @property
    def _path(self) -> Path:
        return Path((self.lend or "").removeprefix("unix:"))

    async def _lend(self, listener: socket.socket, rank: "LentRank", token: str) -> None:
        from kvpool.lending.lending_server import LendingServer  # noqa: PLC0415 - torch is optional

        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        keeps_memory = True  # after an error, too
        try:
            await LendingServer(self._path, listener, rank, token).serve(stop)
            keeps_memory = self.keep_memory
        finally:
            await rank.stop(keeps_memory=keeps_memory)

    def _token(self) -> str:
        try:
            return read_secret("--lend-token-file", self.lend_token_file) if self.lend_token_file else ""
        except ValueError as error:
            raise click.ClickException(str(error)) from error


def _warn_if_declared(settings: WorkerSettings) -> None:
    """Logs that engines with memory of their own have the pool. Says nothing if the server does not answer at once."""
    with (
        contextlib.suppress(KvpoolError, ValueError),  # the rank reports them
        connect_as(settings.access, settings.server, _LOOK_SECONDS) as client,
    ):
        if not client.get_pool(settings.pool).ranks:
            remedy = "end its engines, then kvpool remove-pool frees its name; or lend for a pool of another name"
            error = f"engines with memory of their own have this pool, which takes no ranks: {remedy}"
            _log.warning("pool cannot be lent", extra={"pool": settings.pool, "rank": settings.rank, "error": error})
