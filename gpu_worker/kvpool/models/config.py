"""Derives the specs of a model's layers from its config.json.

Rule 1: sizes come from the config's own keys. What the name of an architecture decides is one row of `families`.
Rule 2: no value is guessed silently. A missing key is an error or a note. Sections of a config leave out what their
class in transformers defines (`class_defaults.json`).
Rule 3: a key that changes the cache and that no rule reads is an error (`ignored_keys`).
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import MambaSpec
from kvpool.models.context import DEFAULT_BLOCK_SIZE, Context, Layer, Model, ModelOptions
from kvpool.models.decoder import decoder
from kvpool.models.dtypes import kv_dtype, model_dtype
from kvpool.models.families import ARCHITECTURES, FAMILIES
from kvpool.models.family import Family
from kvpool.models.ignored_keys import check_ignored_keys
from kvpool.models.kinds import read_kinds
from kvpool.models.length import stated_length
from kvpool.models.reader import Reader

__all__ = ["FAMILIES", "Model", "ModelOptions", "derive_model", "split_stages"]

_SECTIONS: Final = ("text_config", "language_config", "llm_config", "thinker_config")
"""Sections that hold the language model in configs of multimodal models; one may hold another."""
_SIZES_OF_HEADS: Final = ("head_dim", "num_key_value_heads")
"""Keys that also whole configs leave out."""
_EXAMPLE: Final = (
    '{"layers": {"model.layers.0.self_attn.attn": {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8,'
    ' "head_size": 128, "dtype": "bfloat16"}}}'
)


def derive_model(config: Mapping[str, object], options: ModelOptions, *, like: str = "") -> Model:
    """Derives the specs of a model's layers.

    Args:
        config: A parsed config.json.
        options: How the model is run.
        like: Known architecture whose rules apply, whatever the config names; empty for the config's own.

    Raises:
        InvalidArgumentError: The architecture is unknown; or a key is missing, malformed or in conflict with an option;
            or a key changes the cache, and no rule reads it. Its field is the key's dotted path or the option.
    """
    top = Reader(config)
    section = _language_model(top)
    architecture, rules = _architecture_like(like, top) if like else _architecture(top, section)
    family = FAMILIES[rules]
    notes = [f"the config is read as that of {like}, as requested"] if like else []
    keys = _with_defaults(section, family)
    dtype = model_dtype(keys, top, notes)
    ctx = Context(
        keys=keys,
        options=options,
        model_dtype=dtype,
        kv_dtype=kv_dtype(options.kv_dtype, dtype, (top, section), notes),
        max_model_len=_max_model_len(keys, family, options, notes),
        notes=notes,
    )
    layers = family.derive(ctx) if family.derive else decoder(ctx, family)
    num_hidden_layers = keys.layers(family.count_key) if family.derive else len(read_kinds(keys, family))
    check_ignored_keys(Reader(_stated(section), section.path, keys.read), rules, family, layers)
    _note_defaults(section, keys, notes)
    _note_unused(options, keys, layers, notes)
    return Model(
        architecture=architecture,
        model_type=top.text("model_type", ""),
        max_model_len=ctx.max_model_len,
        layers=tuple((layer.name, layer.spec) for layer in layers),
        layer_indices=tuple(layer.index for layer in layers),
        num_hidden_layers=num_hidden_layers,
        notes=tuple(notes),
        max_encoder_tokens=keys.tokens(family.encoder_length_key) if family.encoder_length_key else 0,
    )


def split_stages(model: Model, pipeline_parallel_size: int) -> list[dict[str, KVCacheSpec]]:
    """Splits the layers over the stages of a pipeline, as vLLM's get_pp_indices does.

    Each stage has num_hidden_layers // pipeline_parallel_size layers. The remaining layers go, one each, to the last
    stages before the final one, which also has the output layer.

    Raises:
        InvalidArgumentError: A stage would have no layers.
    """
    count = model.num_hidden_layers
    if not 1 <= pipeline_parallel_size <= count:
        raise InvalidArgumentError(
            "pipeline_parallel_size", f"{pipeline_parallel_size} is not in [1, {count}], the number of decoder layers"
        )
    each, left_over = divmod(count, pipeline_parallel_size)
    sizes = [each] * pipeline_parallel_size
    for i in range(2, left_over + 2):
        sizes[-i] += 1
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    stages: list[dict[str, KVCacheSpec]] = [{} for _ in sizes]
    for index, (name, spec) in zip(model.layer_indices, model.layers, strict=True):
        stages[stage_of[index]][name] = spec
    return stages


def _language_model(top: Reader) -> Reader:
    key = next((key for key in _SECTIONS if top.has(key)), "")
    return _language_model(top.section(key)) if key else top


def _stated(section: Reader) -> dict[str, object]:
    return {key: value for key, value in section.values.items() if value is not None}


@cache
def _table_of_defaults() -> dict[str, dict[str, Any]]:
    """By model_type: values that config classes define. tests/engine/record_class_defaults.py writes the file."""
    table: dict[str, dict[str, Any]] = json.loads(files("kvpool.models").joinpath("class_defaults.json").read_text())
    return table


def _class_defaults(section: Reader) -> Mapping[str, object]:
    """Values that the section's class in transformers defines for keys that the section does not have."""
    defaults = _table_of_defaults().get(section.text("model_type", ""), {})
    stated = Reader(section.values)
    usable = defaults if section.path else [key for key in defaults if key in _SIZES_OF_HEADS]
    return {key: defaults[key] for key in usable if key not in section.values and not stated.has(key)}


def _with_defaults(section: Reader, family: Family) -> Reader:
    """Reader of the section, with what its class and its family define, and the values that follow from others."""
    keys = Reader({**family.defaults, **_class_defaults(section), **_stated(section)}, section.path)
    if family.adapt is None:
        return keys
    return Reader({**keys.values, **family.adapt(keys)}, section.path, keys.read)


def _note_defaults(section: Reader, keys: Reader, notes: list[str]) -> None:
    used = {key: value for key, value in _class_defaults(section).items() if key in keys.read}
    if used:
        values = ", ".join(f"{key} = {value}" for key, value in used.items())
        notes.append(f"{section.path or 'the config'} leaves out what its class in transformers defines: {values}")


def _named_architecture(keys: Reader) -> str:
    names = keys.texts("architectures") if keys.has("architectures") else []
    return names[0] if names else ""


def _architecture_like(like: str, top: Reader) -> tuple[str, str]:
    if like not in FAMILIES:
        raise InvalidArgumentError("like", f"{like!r} is not known.{_known_like(like)}")
    return _named_architecture(top) or like, like


def _architecture(top: Reader, section: Reader) -> tuple[str, str]:
    """Finds the architecture by the names of the whole model, then by those of its language model.

    Returns:
        The architecture that the config names, and the known one whose rules apply.
    """
    for keys in (top, section):
        name = _named_architecture(keys) or ARCHITECTURES.get(keys.text("model_type", ""), "")
        if name in FAMILIES:
            return _named_architecture(top) or name, name
    name = _named_architecture(top) or top.text("model_type", "")
    problem = f"{name!r} is not known" if name else "it states neither architectures nor model_type"
    raise InvalidArgumentError(
        "architectures",
        f"{problem}. If its layers are as those of a known architecture, name that: --like ARCHITECTURE. Otherwise"
        f" describe its layers in a file: --layers FILE, with {_EXAMPLE}.{_known_like(name)}",
        reason="UNKNOWN_ARCHITECTURE",
    )


def _known_like(name: str) -> str:
    """Returns a sentence on known architectures: those with names like this one, or how many there are."""
    close = get_close_matches(name, FAMILIES) or ["LlamaForCausalLM"]
    return f" {len(FAMILIES)} architectures are known, such as {', '.join(close)}; the reference of models lists them"


def _max_model_len(keys: Reader, family: Family, options: ModelOptions, notes: list[str]) -> int:
    stated = stated_length(keys, family, notes)
    if options.max_model_len > stated:
        notes.append(f"max_model_len {options.max_model_len} is more than the {stated} tokens that the config states")
    return options.max_model_len or stated


def _note_unused(options: ModelOptions, keys: Reader, layers: Sequence[Layer], notes: list[str]) -> None:
    """Notes the options without effect, and the memory that is not counted."""
    kinds = {type(layer.spec) for layer in layers}
    if MambaSpec not in kinds:
        unused = [name for name in ("mamba_caching", "num_speculative_tokens") if getattr(options, name)]
        notes += [f"{name} has no effect: no layer has a state" for name in unused]
    if kinds == {MambaSpec}:
        if options.kv_dtype:
            notes.append("kv_dtype has no effect: no layer has attention")
        if options.block_size != DEFAULT_BLOCK_SIZE and not options.mamba_caching:
            notes.append("block_size has no effect: no layer has attention, and states are not cached")
    if options.num_speculative_tokens and keys.has("num_nextn_predict_layers"):
        notes.append("num_nextn_predict_layers: the cache of draft layers is not counted")
    windows = sorted(kind.__name__ for kind in kinds if not kind.keeps_all)
    if options.decode_context_parallel_size > 1 and windows:
        notes.append(f"context parallelism over {', '.join(windows)} is not supported by vLLM")
