"""`kvpool worker`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.access import access_options, allowed_plaintext, current_access
from kvpool.cli.endpoints import Endpoints
from kvpool.cli.lending import LendingFlags, lending_options
from kvpool.cli.logs import log_options, start_logging
from kvpool.cli.model import FLAGS, ModelFlags, byte_size, model_options, own_flags
from kvpool.cli.options import enum_option
from kvpool.cli.settings import config_option, take_config
from kvpool.core.errors import InvalidArgumentError, fields_renamed
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import EncoderOnlyAttentionSpec
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.gpu_worker.settings import (
    DEFAULT_DEVICE,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_RESERVE_BYTES,
    WorkerSettings,
)
from kvpool.gpu_worker.worker_metrics import WorkerCollector
from kvpool.models.config import Model, split_stages
from kvpool.wire.address import DEFAULT_ADDRESS

_FLAGS: Final = {
    **FLAGS,
    **own_flags("server", "pool", "rank", "world_size", "device", "gpu_memory_utilization"),
    **own_flags("layout", "lend", "lend_folder"),
    "memory_bytes": "--memory",
    "reserve_bytes": "--reserve",
    "host_memory_bytes": "--host-memory",
}


@click.command()
@config_option
@click.option(
    "--server",
    default=DEFAULT_ADDRESS,
    metavar="ADDRESS",
    help="host:port or unix:/path; those of a primary and its standbys, separated by commas.",
)
@click.option("--pool", required=True, metavar="NAME", help="Pool of the rank. The first rank to register creates it.")
@click.option("--rank", type=int, required=True, help="Number of this rank, from 0, in order of stages.")
@click.option("--world-size", type=int, help="Number of ranks of the pool: --tp times --pp.")
@click.option("--model", type=click.Path(path_type=Path), metavar="CONFIG.json", help="config.json of the model.")
@model_options
@lending_options
@click.option("--device", default=DEFAULT_DEVICE, help='A CUDA device, or "cpu".')
@click.option(
    "--gpu-memory-utilization",
    type=float,
    metavar="SHARE",
    help=f"Share of the device's memory that may be in use in total; default: {DEFAULT_GPU_MEMORY_UTILIZATION}.",
)
@click.option(
    "--memory",
    type=byte_size,
    metavar="SIZE",
    help="Memory for the KV cache, such as 8GiB, instead of a share of the device.",
)
@click.option(
    "--reserve",
    type=byte_size,
    default=f"{DEFAULT_RESERVE_BYTES // 2**20}MiB",
    metavar="SIZE",
    help="Memory to leave free on a CUDA device besides the KV cache.",
)
@enum_option("--reuse-order", ReuseOrder, ReuseOrder.UNCACHED_FIRST, "Order in which freed blocks are reused.")
@click.option("--no-caching", is_flag=True, help="Turn prefix caching off.")
@click.option("--events", is_flag=True, help="Publish block events.")
@click.option(
    "--layout", metavar="NAME", help="Layout of keys and values in a page; default: that of the layer's kind."
)
@click.option(
    "--metrics-listen", metavar="HOST:PORT", help="Serve metrics for Prometheus at this address; usual port: 9465."
)
@click.option(
    "--health-listen", metavar="ADDRESS", help="Serve gRPC health checks at this address: host:port or unix:/path."
)
@access_options("metrics", "health")
@log_options
def worker(
    log_level: str,
    log_format: str,
    model: Path | None,
    **options: Any,  # noqa: ANN401 - named and checked by dataclasses
) -> None:
    """Run one rank of a pool until SIGTERM.

    The rank holds the layers of its pipeline stage, with its share of the heads. All ranks of a pool need the same
    model and options. Every option can also be set in the environment (KVPOOL_WORKER_POOL and so on) or in the file of
    --config.
    """
    start_logging(log_level, log_format)
    lending = take_config(options, LendingFlags)
    flags = take_config(options, ModelFlags)
    layout = options.pop("layout")
    endpoints = Endpoints.parse(options.pop("metrics_listen"), options.pop("health_listen"), allowed_plaintext())
    with fields_renamed(lambda field: _FLAGS.get(field, field)):
        if lending.lend:
            lending.refuse_planned(click.get_current_context())
            with _torch_named():
                lending.run(lending.settings(options, current_access()), endpoints)
            return
        derived = flags.read_model(model, "--lend unix:PATH for the memory of engines, --model CONFIG.json")
        settings = _settings(flags, derived, options)
        layers = split_stages(derived, flags.pp)[settings.rank // flags.tp]
        _run(settings, layers, layout, endpoints)


def _settings(flags: ModelFlags, model: Model, options: dict[str, Any]) -> WorkerSettings:
    world_size, count = options.pop("world_size"), flags.tp * flags.pp
    if world_size not in (None, count):
        message = f"{world_size} is not --tp {flags.tp} times --pp {flags.pp}, which is {count}"
        raise InvalidArgumentError("world_size", message)
    share, memory_bytes = options.pop("gpu_memory_utilization"), options.pop("memory")
    if share is not None and memory_bytes is not None:
        raise click.UsageError("--memory and --gpu-memory-utilization exclude each other")
    group_options = RankGroupOptions(
        **flags.plan_arguments(model),
        reuse_order=options.pop("reuse_order"),
        enable_caching=not options.pop("no_caching"),
        enable_events=options.pop("events"),
    )
    return WorkerSettings(
        world_size=count,
        options=group_options,
        memory_bytes=memory_bytes,
        gpu_memory_utilization=DEFAULT_GPU_MEMORY_UTILIZATION if share is None else share,
        reserve_bytes=options.pop("reserve"),
        access=current_access(),
        **options,
    )


def _run(settings: WorkerSettings, layers: dict[str, KVCacheSpec], layout: str | None, endpoints: Endpoints) -> None:
    with _torch_named():
        from kvpool.gpu_worker.worker import Worker, WorkerHooks  # noqa: PLC0415 - torch is optional

    layouts = {name: layout for name, spec in layers.items() if layout and _has_keys_and_values(spec)}
    with endpoints.health_served() as on_status:
        rank = Worker(settings, layers, layouts=layouts, hooks=WorkerHooks(on_status=on_status))
        with endpoints.metrics_served(WorkerCollector(rank, settings)):
            rank.run()


@contextmanager
def _torch_named() -> Iterator[None]:
    """Explains what is missing if torch is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        message = f"kvpool worker needs {error.name}: install kvpool with its extra 'worker'"
        raise click.ClickException(message) from error


def _has_keys_and_values(spec: KVCacheSpec) -> bool:
    return isinstance(spec, AttentionSpec) and not (spec.is_latent or isinstance(spec, EncoderOnlyAttentionSpec))
