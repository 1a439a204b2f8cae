"""Transcripts of models: which layers follow from a config, or why it is refused.

A command names a config of examples/model_configs, or one beside the transcripts, then what differs:

| word | what it changes |
|---|---|
| `head_dim=96`, `text_config.head_dim=96` | a key; its value is JSON or a text; in a list, `"3*x"` are three x |
| `head_dim=...` | the config has no such key |
| `--block_size=64` | an option of `ModelOptions` |
| `--like=LlamaForCausalLM` | the architecture whose rules apply |
| `--stages=4` | shows the number of layers of each stage |

Each kind of layer has a letter, with the first layer of its kind; `layers` has the letters of all hidden
layers, a point for one without a cache.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.models.config import Model, ModelOptions, derive_model, split_stages
from support.paths import MODEL_CONFIGS


class ModelTranscript:
    """Derives the models of a transcript."""

    def __init__(self, folder: Path) -> None:
        """Finds further configs in a folder."""
        self._folder = folder

    def execute(self, name: str, *words: str) -> list[str]:
        """Derives a model; returns its description."""
        options = {
            key: _value(value) for key, _, value in (word[2:].partition("=") for word in words if word[:2] == "--")
        }
        like, stages = options.pop("like", ""), options.pop("stages", None)
        path = MODEL_CONFIGS / f"{name}.json"
        config = json.loads((path if path.exists() else self._folder / f"{name}.json").read_text())
        for key, _, value in (word.partition("=") for word in words if not word.startswith("--")):
            _change(config, key, value)
        try:
            model = derive_model(config, ModelOptions(**options), like=like)
            return _shown(model) if stages is None else _shown_stages(model, stages)
        except InvalidArgumentError as error:
            return [f"refused: {error.reason}: {' '.join(str(error).split())}"]


def _change(config: dict[str, Any], key: str, value: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    if value == "...":
        config.pop(last, None)
    else:
        config[last] = _value(value)


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return _expanded(value) if isinstance(value, list) else value


def _expanded(values: list[Any]) -> list[Any]:
    expanded: list[Any] = []
    for value in values:
        count, star, repeated = value.partition("*") if isinstance(value, str) else ("", "", "")
        expanded += [_value(repeated)] * int(count) if star else [value]
    return expanded


def _shown(model: Model) -> list[str]:
    letters: dict[KVCacheSpec, str] = {}
    kinds = []
    for name, spec in model.layers:
        if spec not in letters:
            letters[spec] = chr(ord("A") + len(letters))
            kinds.append(f"{letters[spec]} {name}: {_spec(spec)}")
    encoder = f", {model.max_encoder_tokens} of an encoder" if model.max_encoder_tokens else ""
    first = f"{model.architecture} ({model.model_type}), {model.max_model_len} tokens{encoder}"
    return [first, f"layers {_places(model, letters)}", *kinds, *(f"note: {note}" for note in model.notes)]


def _shown_stages(model: Model, num_stages: int) -> list[str]:
    return [f"stages {' '.join(str(len(stage)) for stage in split_stages(model, num_stages))}"]


def _places(model: Model, letters: dict[KVCacheSpec, str]) -> str:
    """The letters of each hidden layer: in brackets if there are several, a point if there is none."""
    places = [""] * model.num_hidden_layers
    for index, (_, spec) in zip(model.layer_indices, model.layers, strict=True):
        places[index] += letters[spec]
    return "".join(f"({place})" if len(place) > 1 else place or "." for place in places)


def _spec(spec: KVCacheSpec) -> str:
    """A spec without the fields that have their defaults."""
    values = ((field, getattr(spec, field.name)) for field in fields(spec))
    stated = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
    return f"{type(spec).__name__}({stated})"
