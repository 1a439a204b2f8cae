"""Configs of public models, and sizes that papers state for them."""

import json
from collections import Counter
from pathlib import Path

from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.models.config import Model, ModelOptions, derive_model
from support.paths import MODEL_CONFIGS

DEFAULT_OPTIONS = ModelOptions()
EXPECTED_FIGURES: dict[str, list[str]] = json.loads((MODEL_CONFIGS.parent / "figures.json").read_text())
"""By the name of a config: what `figures` returns."""


def config(name: str, folder: Path = MODEL_CONFIGS) -> dict[str, object]:
    data = json.loads((folder / f"{name}.json").read_text())
    assert isinstance(data, dict)
    return data


def changed(name: str, **changes: object) -> dict[str, object]:
    """A config with some keys changed; keys changed to ... are removed."""
    data = config(name) | changes
    return {key: value for key, value in data.items() if value is not ...}


def derive(name: str, options: ModelOptions = DEFAULT_OPTIONS) -> Model:
    return derive_model(config(name), options)


def kinds(model: Model) -> dict[str, int]:
    return dict(Counter(type(spec).__name__ for _, spec in model.layers))


def figures(model: Model) -> list[str]:
    """Returns layers by kind, bytes per token without and with a window, and bytes of state per request."""
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds(model).items()))
    sizes = full_bytes_per_token(model), windowed_bytes_per_token(model), state_bytes_per_request(model)
    return [counted, *(f"{size:,}" for size in sizes)]


def specs_of(model: Model, kind: type[KVCacheSpec]) -> list[KVCacheSpec]:
    return [spec for _, spec in model.layers if isinstance(spec, kind)]


def full_bytes_per_token(model: Model) -> int:
    return _bytes_per_token(model, FullAttentionSpec)


def windowed_bytes_per_token(model: Model) -> int:
    return _bytes_per_token(model, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def state_bytes_per_request(model: Model) -> int:
    return sum(spec.content_size_bytes for spec in specs_of(model, MambaSpec))


def _bytes_per_token(model: Model, *wanted: type[AttentionSpec]) -> int:
    return sum(spec.content_size_bytes // spec.block_size for _, spec in model.layers if isinstance(spec, wanted))
