"""`kvpool plan`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvpool.cli.model import FLAGS, ModelFlags, byte_size, model_options
from kvpool.cli.options import enum_option
from kvpool.cli.plan_plot import draw
from kvpool.cli.plan_report import PlannedModel, as_json, error_as_json, print_tables
from kvpool.cli.svg import write_plot
from kvpool.cli.tables import print_json
from kvpool.cli.with_vllm import model_of_vllm
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import MambaCacheMode
from kvpool.models.config import Model, split_stages
from kvpool.wire.log_fields import format_bytes


class _JsonErrors(click.Command):
    """Prints usage errors as JSON if --json is given, as it does errors of the plan."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **extra: Any) -> click.Context:  # noqa: ANN401 - click's signature
        with _json_errors(wanted="--json" in args):
            return super().make_context(info_name, args, *others, **extra)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        with _json_errors(wanted=ctx.params["json_wanted"]):
            return super().invoke(ctx)


@contextmanager
def _json_errors(*, wanted: bool) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if not wanted:
            raise
        print_json({"error": {"reason": "USAGE", "field": "", "message": error.format_message()}})
        raise click.exceptions.Exit(error.exit_code) from error


@click.command(cls=_JsonErrors)
@click.argument("config", type=click.Path(path_type=Path), required=False, metavar="[CONFIG.json]")
@click.option(
    "--memory",
    type=byte_size,
    metavar="SIZE",
    multiple=True,
    required=True,
    help="Memory for the KV cache of each rank, such as 80GiB. Repeat it once per rank, in order of stages.",
)
@click.option(
    "--engines",
    type=click.IntRange(1, 1024),
    default=1,
    help="Engines that share the cache in lent memory.",
)
@click.option(
    "--engine-memory",
    type=byte_size,
    metavar="SIZE",
    default="0",
    help="What each of the engines takes of --memory for itself, as for weights and activations.",
)
@click.option(
    "--host-memory",
    type=byte_size,
    metavar="SIZE",
    help="Host memory of each rank for evicted blocks, as --host-memory of its worker, such as 64GiB.",
)
@model_options
@enum_option(
    "--mamba-cache-mode",
    MambaCacheMode,
    MambaCacheMode.ALL,
    "Mamba states that a request keeps: all that a step needs, as pools of kvpool do; or as vLLM counts in this mode.",
)
@click.option(
    "--with-vllm", is_flag=True, help="Take the layers from the vLLM of this environment, which builds the model."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Draw memory of a request and requests at once against the length of requests.",
)
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(  # noqa: PLR0913 - an argument for each option
    ctx: click.Context,
    /,
    *,
    config: Path | None,
    memory: tuple[int, ...],
    engines: int,
    engine_memory: int,
    host_memory: int | None,
    mamba_cache_mode: MambaCacheMode,
    with_vllm: bool,
    plot: Path | None,
    json_wanted: bool,
    **options: Any,  # noqa: ANN401 - named and checked by ModelFlags
) -> None:
    """Plan a model's KV cache (groups, tensors and num_blocks) from its config.json and the memory of each rank.

    Loads no weights and contacts no server. Assumes that tensor-parallel ranks are equal. --memory is the part of a
    rank's memory that weights and activations leave for the KV cache, or with --engine-memory all of it.
    """
    flags = ModelFlags(**options)
    _check_not_negative("--host-memory", host_memory or 0)
    try:
        model = model_of_vllm(config, flags) if with_vllm else flags.read_model(config, "CONFIG.json")
        ranks = _ranks(model, _for_cache(memory, engines, engine_memory), flags.tp, flags.pp)
        plan_options = PlanOptions(**flags.plan_arguments(model), mamba_cache_mode=mamba_cache_mode)
        cache = get_kv_cache_configs(ranks, plan_options)
        planned = PlannedModel(model, ranks, plan_options, cache, flags.tp, engines, host_memory)
    except InvalidArgumentError as error:
        error.rename_field(FLAGS.get(error.field, error.field))
        if not json_wanted:
            raise
        print_json(error_as_json(error))
        ctx.exit(1)
    if plot:
        write_plot(plot, draw(planned))
    if json_wanted:
        print_json(as_json(planned))
    else:
        print_tables(planned)


def _for_cache(memory: Sequence[int], engines: int, engine_memory: int) -> list[int]:
    """Returns what the engines leave of the memory of each rank: the most that its worker can lend."""
    _check_not_negative("--engine-memory", engine_memory)
    for size in memory:
        if engine_memory and size <= engines * engine_memory:
            raise click.UsageError(
                f"--engine-memory: {engines} x {format_bytes(engine_memory)} leave nothing of {format_bytes(size)}"
            )
    return [size - engines * engine_memory for size in memory]


def _check_not_negative(option: str, size_bytes: int) -> None:
    if size_bytes < 0:
        raise click.UsageError(f"{option}: must not be negative")


def _ranks(model: Model, memory: Sequence[int], tp: int, pp: int) -> tuple[RankMemory, ...]:
    """Returns the layers and memory of each rank: tensor ranks within pipeline stages."""
    count = tp * pp
    if len(memory) not in (1, count):
        raise click.UsageError(f"--memory: given {len(memory)} times; give it once, or once per rank ({count})")
    stages = split_stages(model, pp)
    memory = [*memory] * (count // len(memory))
    return tuple(RankMemory(stages[rank // tp], memory[rank]) for rank in range(count))
