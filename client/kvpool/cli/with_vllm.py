"""Layers of a model as the vLLM of this environment declares them, for `kvpool plan --with-vllm`."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from kvpool.cli.model import ModelFlags, read_object
from kvpool.models.config import Model
from kvpool.models.layers_file import model_of_layers, read_layers

_TIMEOUT_SECONDS: Final = 600
"""Time to import vLLM and to build a model, whose experts are objects of their own."""


def model_of_vllm(config: Path | None, flags: ModelFlags) -> Model:
    """Builds a model with vLLM in another process, and reads its layers.

    Args:
        config: The config.json, or its folder; None if the caller has none.
        flags: Options of the model.

    Raises:
        click.UsageError: There is no config, vLLM is not installed, cannot build the model, or an option is not for it.
    """
    if config is None:
        raise click.UsageError("--with-vllm needs CONFIG.json")
    if find_spec("vllm") is None:
        raise click.UsageError(f"--with-vllm: vLLM is not installed in the environment of {sys.executable}")
    refused = {"--layers": flags.layers, "--like": flags.like, "--num-speculative-tokens": flags.num_speculative_tokens}
    for name, is_given in {**refused, "--dcp": flags.dcp > 1}.items():
        if is_given:
            raise click.UsageError(f"--with-vllm and {name} exclude each other")
    path = config / "config.json" if config.is_dir() else config
    text = json.dumps(read_object(path))
    with TemporaryDirectory() as folder:
        if not config.is_dir():  # vLLM reads a folder
            Path(folder, "config.json").write_text(text)
        facts = _facts(config if config.is_dir() else Path(folder), flags)
    if "error" in facts:
        raise click.UsageError(f"--with-vllm: vLLM cannot build the model without its weights: {facts['error']}")
    notes = [
        f"layers are those of vLLM {facts['vllm']} on this machine, which chooses backends and sizes of blocks",
        f"vLLM has {facts['max_in_flight_tokens']} tokens in flight: --max-num-batched-tokens counts them for windows",
    ]
    model = model_of_layers(read_layers({"layers": facts["layers"]}), facts["max_model_len"])
    return model.named(facts["architecture"], facts["num_hidden_layers"], tuple(notes))


def _facts(folder: Path, flags: ModelFlags) -> dict[str, Any]:
    arguments: dict[str, Any] = {"tensor_parallel_size": flags.tp, "enable_prefix_caching": flags.mamba_caching}
    given = {
        "block_size": flags.block_size,
        "kv_cache_dtype": flags.kv_dtype,
        "attention_backend": flags.backend,
        "max_model_len": flags.max_model_len if isinstance(flags.max_model_len, int) else None,
    }
    arguments |= {name: value for name, value in given.items() if value is not None}
    program = (sys.executable, "-m", "kvpool.client.vllm.model_layers", str(folder), json.dumps(arguments))
    try:
        done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)  # noqa: S603 - our own program
    except subprocess.TimeoutExpired:
        return {"error": f"it takes more than {_TIMEOUT_SECONDS} seconds"}
    last = done.stdout.rstrip().rpartition("\n")[2]
    try:
        facts: dict[str, Any] = json.loads(last)
    except ValueError:
        ends = done.stderr.rstrip().rpartition("\n")[2] or f"exit status {done.returncode}"
        return {"error": ends}
    return facts
