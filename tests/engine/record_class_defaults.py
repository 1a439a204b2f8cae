"""Writes gpu_worker/kvpool/models/class_defaults.json: what config classes of transformers define for the cache.

Run it in the environment of the engine tests: python -m engine.record_class_defaults
"""

import json
import warnings
from pathlib import Path
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvpool.models.families import ARCHITECTURES

TARGET: Final = Path(__file__).parents[2] / "gpu_worker/kvpool/models/class_defaults.json"
KEYS: Final = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mamba_ssm_dtype",
    "conv_L_cache",
    "num_kv_shared_layers",
    "attention_chunk_size",
)


def defaults_of(model_type: str) -> dict[str, object]:
    """Returns the values that the class of a model type defines, without those that it computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kind: Any = CONFIG_MAPPING[model_type]
        except KeyError:
            return {}
    names = getattr(kind, "attribute_map", {})
    values = {key: getattr(kind, names.get(key, key), None) for key in KEYS}
    return {key: value for key, value in values.items() if isinstance(value, int | str) and value is not False}


def table() -> str:
    """Returns the text of the file, with one line per model type."""
    rows = {model_type: defaults_of(model_type) for model_type in sorted(ARCHITECTURES)}
    lines = [f"{json.dumps(model_type)}: {json.dumps(values)}" for model_type, values in rows.items() if values]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TARGET.write_text(table())
