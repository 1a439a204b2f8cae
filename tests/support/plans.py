"""What vLLM declares and plans for configs of many architectures, and the same of `kvpool.models`."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvpool.core.planning.plan import Plan, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec, MambaCacheMode
from kvpool.core.specs.kinds import EncoderOnlyAttentionSpec, MambaSpec
from kvpool.models.config import Model, ModelOptions, derive_model
from kvpool.models.context import BACKENDS, DEFAULT_BLOCK_SIZE
from support.paths import TESTS

MEMORY_BYTES: Final = 2**40
"""Enough for a request of any of these models."""
RECORDED: Final = TESTS / "golden" / "model_plans.json.gz"


def describe(spec: KVCacheSpec) -> str:
    """Returns what decides the memory and the blocks of a layer."""
    words = [type(spec).__name__, f"block {spec.block_size}", f"page {spec.page_size_bytes}"]
    if isinstance(spec, MambaSpec):
        words += [f"{shape} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    if isinstance(spec, AttentionSpec):
        sizes = f"{spec.head_size}" + (f"/{spec.head_size_v}" if spec.head_size_v and not spec.is_latent else "")
        words.append(f"{spec.num_kv_heads} x {sizes} {spec.dtype}")
    for name in ("sliding_window", "attention_chunk_size"):
        if tokens := getattr(spec, name, 0):
            words.append(f"{name} {tokens}")
    return ", ".join(words)


def described(specs: Iterable[KVCacheSpec]) -> list[list[object]]:
    """Returns the numbers of equal layers, sorted by their description."""
    return [[count, kind] for kind, count in sorted(Counter(map(describe, specs)).items())]


def read_recorded() -> dict[str, dict[str, Any]]:
    """Returns what vLLM answered, by case: the config, and the plan or an error."""
    if not RECORDED.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return {row["case"]: row for row in rows}


def write_recorded(rows: Mapping[str, dict[str, Any]]) -> None:
    """Writes what vLLM answered."""
    text = json.dumps([rows[name] for name in sorted(rows)])
    RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))


def derived(row: Mapping[str, Any]) -> tuple[Model, Plan]:
    """Returns the model that `kvpool.models` derives from a row's config, and its plan, on the backend of the row.

    Without a plan of vLLM, on one with blocks of 16 tokens.
    """
    backend = row.get("backend", "")
    block_size = BACKENDS[backend].block_size if backend else DEFAULT_BLOCK_SIZE
    model = derive_model(row["config"], ModelOptions(block_size, tensor_parallel_size=row["ranks"], backend=backend))
    options = PlanOptions(
        model.max_model_len,
        max_num_batched_tokens=row.get("max_in_flight_tokens", 2048),
        max_num_encoder_input_tokens=row.get("max_encoder_tokens", 2048),
        mamba_cache_mode=MambaCacheMode.NONE,
        block_outermost=model.packs_pages,
    )
    return model, get_kv_cache_configs([RankMemory(dict(model.layers), MEMORY_BYTES)], options)


def as_vllm_answers(model: Model, plan: Plan) -> dict[str, Any]:
    """Returns of a model and its plan what vLLM answers. Encoder layers, which keep nothing, are left out."""
    kept = [spec for _, spec in model.layers if not isinstance(spec, EncoderOnlyAttentionSpec)]
    return {
        "max_model_len": model.max_model_len,
        "layers": described(kept),
        "num_blocks": plan.num_blocks,
        "groups": sorted([len(group.layer_names), group.spec.block_size] for group in plan.groups),
        "concurrency": round(plan.max_concurrency, 2),
    }
