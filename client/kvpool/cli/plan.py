"""`kvpool plan`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvpool.cli.model import FLAGS, ModelFlags, byte_size, model_options
from kvpool.cli.plan_report import PlannedModel, as_json, error_as_json, print_tables
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.plan import FitCheck, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.models.config import Model, split_stages


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False, metavar="[CONFIG.json]")
@click.option(
    "--memory",
    type=byte_size,
    metavar="SIZE",
    multiple=True,
    required=True,
    help="Memory for the KV cache of each rank (80GiB), or once for every rank, stage by stage.",
)
@model_options
@click.option(
    "--fit-check",
    type=click.Choice([check.value for check in FitCheck]),
    default=FitCheck.WHOLE_REQUEST.value,
    show_default=True,
    help="What counts when the longest request must fit; first_group is vLLM 0.14.1's way.",
)
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    *,
    config: Path | None,
    memory: tuple[int, ...],
    fit_check: str,
    json_wanted: bool,
    **options: Any,  # noqa: ANN401 - named and checked by ModelFlags
) -> None:
    """Plan a model's KV cache: groups, tensors and num_blocks, from its config.json and the memory of a rank.

    Nothing is loaded and no server is asked. Tensor-parallel ranks are taken to be alike; --memory is what is left of
    a rank's memory for the KV cache, after weights and activations.
    """
    flags = ModelFlags(**options)
    try:
        model = flags.read_model(config, "CONFIG.json")
        ranks = _ranks(model, memory, flags.tp, flags.pp)
        asked = PlanOptions(**flags.plan_fields(model), fit_check=FitCheck(fit_check))
        planned = PlannedModel(model, ranks, asked, get_kv_cache_configs(ranks, asked), flags.tp)
    except InvalidArgumentError as error:
        error.rename_field(FLAGS.get(error.field, error.field))
        if not json_wanted:
            raise
        click.echo(json.dumps(error_as_json(error)))
        ctx.exit(1)
    if json_wanted:
        click.echo(json.dumps(as_json(planned)))
    else:
        print_tables(planned)


def _ranks(model: Model, memory: Sequence[int], tp: int, pp: int) -> tuple[RankMemory, ...]:
    """Every rank's layers and memory: tensor ranks within pipeline stages."""
    count = tp * pp
    if len(memory) not in (1, count):
        raise click.UsageError(f"--memory is given {len(memory)} times: needs once, or once a rank ({count})")
    stages = split_stages(model, pp)
    memory = [*memory] * (count // len(memory))
    return tuple(RankMemory(stages[rank // tp], memory[rank]) for rank in range(count))
