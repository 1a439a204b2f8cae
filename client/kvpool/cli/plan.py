"""`kvpool plan`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from kvpool.cli.plan_report import PlannedModel, as_json, error_as_json, print_tables
from kvpool.models.config import Model, ModelOptions, derive_model, split_stages
from kvpool.models.context import DEFAULT_BLOCK_SIZE
from kvpool.models.layers_file import model_of_layers, read_layers
from kvpool.server.core.errors import InvalidArgumentError
from kvpool.server.core.plan import FitCheck, PlanOptions, RankMemory
from kvpool.server.core.planner import get_kv_cache_configs
from kvpool.server.core.types import MAX_TOKENS

_SIZE: Final = re.compile(r"\s*(-?\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]i?)?B?\s*", re.IGNORECASE)
_TOKENS: Final = re.compile(r"\d{1,11}", re.ASCII)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_AUTO: Final = "auto"
_ENCODER_TOKENS: Final = 1500
_FLAGS: Final = {
    "block_size": "--block-size",
    "kv_dtype": "--kv-dtype",
    "tensor_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "decode_context_parallel_size": "--dcp",
    "max_model_len": "--max-model-len",
    "num_blocks_override": "--num-blocks",
    "disable_hybrid_kv_cache_manager": "--no-hybrid",
}
"""By the name that the planner gives it: the flag of an option at fault."""


def byte_size(text: str) -> int:
    """Reads a size: 80GiB (powers of 1024), 80GB (powers of 1000), or a number of bytes."""
    found = _SIZE.fullmatch(text)
    if not found:
        raise click.BadParameter(f"{text!r} is not a size such as 80GiB, 80GB or 85899345920")
    number, unit = found[1], (found[2] or "").lower()
    factor = (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")]
    return int(float(number) * factor) if "." in number else int(number) * factor


def length_or_auto(text: str) -> int | str:
    """Reads a number of tokens, or "auto"."""
    if text == _AUTO:
        return _AUTO
    if not (_TOKENS.fullmatch(text) and 1 <= int(text) <= MAX_TOKENS):
        raise click.BadParameter(f"{text!r} is neither a number of tokens in [1, {MAX_TOKENS}] nor {_AUTO!r}")
    return int(text)


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
@click.option("--layers", type=click.Path(path_type=Path), help="JSON file of layer specs, instead of CONFIG.json.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--dcp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Context-parallel ranks.")
@click.option("--block-size", type=click.IntRange(1), default=None, help="Tokens a block of attention; default: 16.")
@click.option("--kv-dtype", metavar="DTYPE", help="fp8, fp8_ds_mla, or a torch dtype; default: the model's own.")
@click.option(
    "--max-model-len",
    type=length_or_auto,
    metavar="TOKENS|auto",
    help='Most tokens of a request; "auto": the longest that fits; default: what the config states.',
)
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True, help="Most tokens of a step."
)
@click.option(
    "--max-encoder-tokens",
    type=click.IntRange(0),
    help="Most tokens of an encoder's output; default: what the config states, else 1500.",
)
@click.option("--num-blocks", type=click.IntRange(1), help="Blocks to make; default: as many as there is room for.")
@click.option(
    "--num-speculative-tokens",
    type=click.IntRange(0, 1024),
    default=0,
    help="Draft tokens of a step, each with a Mamba state of its own. Layers of the draft model are not counted.",
)
@click.option("--mamba-caching", is_flag=True, help="Keep Mamba states at block boundaries, to be found again.")
@click.option("--no-hybrid", is_flag=True, help="Keep all tokens of all layers: one kind of group.")
@click.option(
    "--fit-check",
    type=click.Choice([check.value for check in FitCheck]),
    default=FitCheck.WHOLE_REQUEST.value,
    show_default=True,
    help="What counts when the longest request must fit; first_group is vLLM 0.14.1's way.",
)
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(  # noqa: PLR0913 - one parameter an option
    ctx: click.Context,
    *,
    config: Path | None,
    memory: tuple[int, ...],
    layers: Path | None,
    tp: int,
    pp: int,
    dcp: int,
    block_size: int | None,
    kv_dtype: str | None,
    max_model_len: int | str | None,
    max_num_batched_tokens: int,
    max_encoder_tokens: int | None,
    num_blocks: int | None,
    num_speculative_tokens: int,
    mamba_caching: bool,
    no_hybrid: bool,
    fit_check: str,
    json_wanted: bool,
) -> None:
    """Plan a model's KV cache: groups, tensors and num_blocks, from its config.json and the memory of a rank.

    Nothing is loaded and no server is asked. Tensor-parallel ranks are taken to be alike; --memory is what is left of
    a rank's memory for the KV cache, after weights and activations.
    """
    if tp % dcp:
        raise click.UsageError(f"--dcp {dcp} does not divide --tp {tp}")
    length = max_model_len if isinstance(max_model_len, int) else 0
    try:
        if layers is None:
            options = ModelOptions(
                block_size or DEFAULT_BLOCK_SIZE, kv_dtype or "", tp, length, mamba_caching, num_speculative_tokens, dcp
            )
            model = _model_of_config(config, options)
        elif config or block_size or kv_dtype or mamba_caching or num_speculative_tokens:
            raise click.UsageError("--layers stands alone: the file says itself how each layer is kept")
        else:
            model = _model_of_file(layers, length)
        ranks = _ranks(model, memory, tp, pp)
        asked = PlanOptions(
            model.max_model_len,
            auto_fit_max_model_len=max_model_len == _AUTO,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_encoder_input_tokens=_encoder_tokens(max_encoder_tokens, model),
            num_blocks_override=num_blocks or 0,
            disable_hybrid_kv_cache_manager=no_hybrid,
            decode_context_parallel_size=dcp,
            fit_check=FitCheck(fit_check),
        )
        planned = PlannedModel(model, ranks, asked, get_kv_cache_configs(ranks, asked), tp)
    except InvalidArgumentError as error:
        error.rename_field(_FLAGS.get(error.field, error.field))
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


def _encoder_tokens(asked: int | None, model: Model) -> int:
    return asked if asked is not None else model.max_encoder_tokens or _ENCODER_TOKENS


def _model_of_config(config: Path | None, options: ModelOptions) -> Model:
    if config is None:
        raise click.UsageError("give CONFIG.json, or --layers FILE")
    return derive_model(_read_object(config), options)


def _model_of_file(layers: Path, max_model_len: int) -> Model:
    if not max_model_len:
        raise click.UsageError("--layers needs --max-model-len in tokens")
    return model_of_layers(read_layers(_read_object(layers)), max_model_len)


def _read_object(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise click.UsageError(f"{path}: is empty")
        data = json.loads(text, object_pairs_hook=_without_repeats)
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{str(path)!r}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise click.UsageError(f"{path}: holds no JSON object")
    return data


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return entries
