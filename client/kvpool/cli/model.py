"""Options of the model and its ranks, which `plan` and `worker` share."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.json_file import read_json
from kvpool.cli.options import together
from kvpool.core.ids import MAX_TOKENS
from kvpool.models.config import Model, ModelOptions, derive_model
from kvpool.models.context import BACKENDS, DEFAULT_BLOCK_SIZE
from kvpool.models.layers_file import model_of_layers, read_layers

_SIZE: Final = re.compile(r"\s*(-?\d{1,18}(?:\.\d{1,18})?)\s*((?:[KMGT]i?)?B?)\s*", re.IGNORECASE)
_TOKENS: Final = re.compile(r"\d{1,11}", re.ASCII)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MODEL_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_AUTO: Final = "auto"
_ENCODER_TOKENS: Final = 1500


def own_flags(*fields: str) -> dict[str, str]:
    """The flags of fields that are named as their fields."""
    return {field: f"--{field.replace('_', '-')}" for field in fields}


FLAGS: Final = {
    **own_flags("like", "backend", "block_size", "kv_dtype", "max_model_len", "block_outermost"),
    "tensor_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "decode_context_parallel_size": "--dcp",
    "num_blocks_override": "--num-blocks",
    "disable_hybrid_kv_cache_manager": "--no-hybrid",
}
"""The flag of each field that an error of the planner can name."""


def byte_size(text: str) -> int:
    """Parses a size: 80GiB (powers of 1024), 80GB (powers of 1000), 80B, or 0."""
    found = _SIZE.fullmatch(str(text))
    if not found:
        raise click.BadParameter(f"{text!r} is not a size such as 80GiB, 80GB or 85899345920B")
    number, unit = found[1], found[2].lower().removesuffix("b")
    if not found[2] and float(number):
        raise click.BadParameter(
            f"{text!r} has no unit; give one, such as {number}GiB or {number}GB ({number}B for bytes)"
        )
    factor = (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")]
    return int(float(number) * factor) if "." in number else int(number) * factor


def length_or_auto(text: str) -> int | str:
    """Parses a number of tokens, or "auto"."""
    text = str(text)
    if text == _AUTO:
        return _AUTO
    if not (_TOKENS.fullmatch(text) and 1 <= int(text) <= MAX_TOKENS):
        raise click.BadParameter(f"{text!r} is neither a number of tokens in [1, {MAX_TOKENS}] nor {_AUTO!r}")
    return int(text)


model_options: Final = together(
    click.option(
        "--layers", type=click.Path(path_type=Path), help="JSON file of layer specs, instead of a config.json."
    ),
    click.option(
        "--like",
        metavar="ARCHITECTURE",
        help="Read the config.json as that of this known architecture, such as LlamaForCausalLM.",
    ),
    click.option("--tp", type=click.IntRange(1), default=1, help="Tensor-parallel ranks per stage."),
    click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline stages."),
    click.option("--dcp", type=click.IntRange(1, 1024), default=1, help="Ranks of decode context parallelism."),
    click.option(
        "--backend",
        metavar="NAME",
        help="Attention backend of vLLM, such as FLASHMLA, whose kernels choose the sizes of blocks.",
    ),
    click.option(
        "--block-size",
        type=click.IntRange(1),
        default=None,
        help="Tokens per attention block; default: that of --backend, else 16.",
    ),
    click.option(
        "--kv-dtype",
        metavar="DTYPE",
        help="fp8, a packed type of vLLM such as nvfp4, or a torch dtype; default: the model's dtype.",
    ),
    click.option(
        "--max-model-len",
        type=length_or_auto,
        metavar="TOKENS|auto",
        help='Maximum tokens of a request; "auto": the longest that fits; default: the limit in the config.',
    ),
    click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048, help="Maximum tokens of a step."),
    click.option(
        "--max-encoder-tokens",
        type=click.IntRange(0),
        help="Maximum output tokens of an encoder; default: the limit in the config, else 1500.",
    ),
    click.option("--num-blocks", type=click.IntRange(1), help="Number of blocks; default: as many as fit."),
    click.option(
        "--num-speculative-tokens",
        type=click.IntRange(0, 1024),
        default=0,
        help="Draft tokens per step; each has its own Mamba state. Layers of a draft model are not counted.",
    ),
    click.option("--mamba-caching", is_flag=True, help="Cache Mamba states at block boundaries."),
    click.option("--no-hybrid", is_flag=True, help="Keep all tokens of all layers, in groups of one kind."),
    click.option(
        "--block-outermost",
        is_flag=True,
        help="One buffer, in which a block has the pages of all layers of a group side by side.",
    ),
)
"""Adds the options of `ModelFlags`."""


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Values of `model_options`; each attribute has the name of its option."""

    layers: Path | None
    like: str | None
    tp: int
    pp: int
    dcp: int
    backend: str | None
    block_size: int | None
    kv_dtype: str | None
    max_model_len: int | str | None
    max_num_batched_tokens: int
    max_encoder_tokens: int | None
    num_blocks: int | None
    num_speculative_tokens: int
    mamba_caching: bool
    no_hybrid: bool
    block_outermost: bool

    def __post_init__(self) -> None:
        if self.tp % self.dcp:
            raise click.UsageError(f"--dcp {self.dcp} does not divide --tp {self.tp}")

    def read_model(self, config: Path | None, config_option: str) -> Model:
        """Reads the model from its config.json, or from the file of layers.

        Args:
            config: Path of the config.json or of its folder, if given.
            config_option: Name of its option, for errors.

        Raises:
            click.UsageError: Neither or both files are given, or a file is not a JSON object.
            InvalidArgumentError: The content of the file is invalid, or contradicts an option.
        """
        length = self.max_model_len if isinstance(self.max_model_len, int) else 0
        if self.layers is None:
            if config is None:
                raise click.UsageError(f"give {config_option}, or --layers FILE")
            if config.is_dir():
                config /= "config.json"
            return derive_model(read_object(config), self._options(length), like=self.like or "")
        if self.like:
            raise click.UsageError("--layers and --like exclude each other")
        of_cache = (self.block_size, self.backend, self.kv_dtype, self.mamba_caching, self.num_speculative_tokens)
        if config or any(of_cache):
            raise click.UsageError("--layers cannot be combined with options of the cache: the file defines each layer")
        if not length:
            raise click.UsageError("--layers needs --max-model-len with a number of tokens")
        return model_of_layers(read_layers(read_object(self.layers)), length)

    def _options(self, max_model_len: int) -> ModelOptions:
        backend = self.backend or ""
        block_size = BACKENDS[backend].block_size if backend in BACKENDS else DEFAULT_BLOCK_SIZE
        return ModelOptions(
            self.block_size or block_size,
            self.kv_dtype or "",
            self.tp,
            max_model_len,
            self.mamba_caching,
            self.num_speculative_tokens,
            self.dcp,
            backend,
        )

    def plan_arguments(self, model: Model) -> dict[str, Any]:
        """Returns the arguments that `PlanOptions` and `RankGroupOptions` have in common."""
        encoder_tokens = self.max_encoder_tokens
        if encoder_tokens is None:
            encoder_tokens = model.max_encoder_tokens or _ENCODER_TOKENS
        return {
            "max_model_len": model.max_model_len,
            "auto_fit_max_model_len": self.max_model_len == _AUTO,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_encoder_input_tokens": encoder_tokens,
            "num_blocks_override": self.num_blocks or 0,
            "disable_hybrid_kv_cache_manager": self.no_hybrid,
            "block_outermost": self.block_outermost or model.packs_pages,
            "decode_context_parallel_size": self.dcp,
        }


def read_object(path: Path) -> dict[str, object]:
    """Reads a JSON object.

    Raises:
        click.UsageError: The file cannot be read, or has no JSON object.
    """
    try:
        data = read_json(path)
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}{_model_hint(path)}") from error
    except ValueError as error:
        raise click.UsageError(f"{str(path)!r}: {error}") from error
    if not isinstance(data, dict):
        raise click.UsageError(f"{path}: not a JSON object")
    return data


def _model_hint(path: Path) -> str:
    """Returns what to do if a path is the name of a model, such as Qwen/Qwen3-0.6B."""
    if path.exists() or path.suffix == ".json" or not _MODEL_NAME.fullmatch(str(path)):
        return ""
    return f"; kvpool downloads no models: run `hf download {path} config.json`, and give the path that it prints"
