"""Layers of a model as vLLM declares them: builds the model without memory for its weights, and asks its layers.

    python -m kvpool.client.vllm.model_layers FOLDER ARGUMENTS

ARGUMENTS are vLLM's engine arguments, as JSON. The last line of the output is one JSON object: the layers in the form
of `kvpool plan --layers` and what vLLM derived besides, or the error.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvpool.core.specs.base import KVCacheSpec

_SPARSITY: Final = "activation_sparsity_pattern"
"""Key from which layers of Gemma 3n compute a number from a tensor, which has no data here. It has no effect on the
cache."""


def build(folder: str, arguments: Mapping[str, Any]) -> Any:
    """Builds the model of a folder's config.json on torch's meta device.

    Args:
        folder: Folder with the config.json.
        arguments: Engine arguments of vLLM. With a tensor_parallel_size, the model is that of rank 0.

    Returns:
        vLLM's configuration, with block sizes chosen and all layers registered.
    """
    import torch  # noqa: PLC0415 - this module is also imported where there is neither torch nor vLLM
    from vllm.config import set_current_vllm_config  # noqa: PLC0415 - as above
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - as above
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415 - as above
    from vllm.platforms import current_platform  # noqa: PLC0415 - as above
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415 - as above

    unread = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
    config = EngineArgs(model=folder, **unread, **arguments).create_engine_config()
    # As in an engine: on a CPU, the worker's module replaces what models ask of a GPU as they are built.
    resolve_obj_by_qualname(config.parallel_config.worker_cls)
    with set_current_vllm_config(config):
        _start_ranks(config.parallel_config.tensor_parallel_size)
        text = config.model_config.hf_text_config
        if hasattr(text, _SPARSITY):
            setattr(text, _SPARSITY, [0.0] * text.num_hidden_layers)
        with torch.device("meta"):
            initialize_model(vllm_config=config, model_config=config.model_config)
        current_platform.update_block_size_for_backend(config)
    return config


def _start_ranks(count: int) -> None:
    """Starts the groups of this process, rank 0 of `count`. Layers ask for the number of ranks; none sends messages."""
    from vllm.distributed import (  # noqa: PLC0415 - as above
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )

    if not model_parallel_is_initialized():
        store = Path(tempfile.mkdtemp(), "store")
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
    get_tp_group().world_size = count


def specs(config: Any) -> dict[str, Any]:
    """Returns vLLM's spec of each layer of a built model, by name."""
    from vllm.config import set_current_vllm_config  # noqa: PLC0415 - as above
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec  # noqa: PLC0415 - as above

    with set_current_vllm_config(config):
        found: dict[str, Any] = get_kv_cache_spec(config)
    return found


def facts(config: Any) -> dict[str, Any]:
    """Returns what `kvpool plan` needs of a built model.

    Raises:
        UnsupportedError: A pool does not support a kind of its layers.
    """
    from kvpool.client.vllm.pool_config import spec_of  # noqa: PLC0415 - as above
    from kvpool.client.vllm.versions import VERSION  # noqa: PLC0415 - as above

    return {
        "layers": {name: _as_json(spec_of(spec)) for name, spec in specs(config).items()},
        "vllm": VERSION,
        "architecture": config.model_config.architecture,
        "max_model_len": config.model_config.max_model_len,
        "num_hidden_layers": config.model_config.get_total_num_hidden_layers(),
        "max_in_flight_tokens": config.max_in_flight_tokens,
    }


def _as_json(spec: KVCacheSpec) -> dict[str, Any]:
    return {"type": type(spec).__name__, **asdict(spec)}


def main(folder: str, arguments: str) -> None:
    """Prints the facts of a model, or why there are none."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        answer = facts(build(folder, json.loads(arguments)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a model's code raises is the answer
        words = str(error).strip() or type(error).__name__
        answer = {"error": f"{type(error).__name__}: {words}"}
    print(f"\n{json.dumps(answer)}", flush=True)  # noqa: T201 - the output of the program
    os._exit(0)  # not the shutdown of libraries, which can hang


if __name__ == "__main__":
    main(*sys.argv[1:])
