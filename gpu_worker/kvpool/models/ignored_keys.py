"""Keys of a config that change the cache, and that the rules of its architecture do not read.

1. A key belongs to the first topic whose pattern it matches. Keys of no topic do not change the cache.
2. Rules that read a key of a topic know its other keys: those that read `mamba_d_state` know `mamba_chunk_size`. Keys
   of heads and of shared layers stand for themselves.
3. A value that says the same as no key does not change the cache: absent, false, 0, full attention in every layer, a
   head size that is the common one, another spelling with the same value.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import QUOTED_CHARACTERS, AttentionSpec
from kvpool.models.context import Layer
from kvpool.models.family import Family
from kvpool.models.reader import SPELLINGS, Reader

_TOPICS: Final = {
    "states": r"(mamba|ssm|recurrent|lightning|kda|conv|short_conv|linear_(attn|num|key|value|conv))_"
    r"|state_size$|d_(state|conv)$|time_step_rank$|lru_width$",
    "latent vectors": r"kv_lora_rank$|qk_(rope|nope)_head_dim$|v_head_dim$",
    "an indexer": r"index(er)?_|compress_r|sparse_(attn|attention)_",
    "an encoder": r"is_encoder_decoder$|(add_)?cross_|(encoder|decoder)_(layers|attention_heads|num_|hidden_size)",
    "kinds of layers": r"layer_types$|layers_block_type$|block_(types|configs)$|attention_types$|attn_(type_list|layer)"
    r"|.*hybrid|full_attn_|full_attention_|global_attn_|.*(layer|window)_pattern$|layer_group_size$",
    "windows": r"(sliding|attention|attn|rswa|interleaved_sliding)_window(s|_size)?$|window(_size)?$"
    r"|attention_chunk_size$",
    "shared layers": r".*kv_shar|.*share[sd]?_kv|.*kv_reuse|use_cla$|cla_",
    "heads": r"(.+_)?(head_dim|key_value_heads|kv_heads)$|(n|num|kv_n)_heads?(_kv)?$|multi_query"
    r"|kv_channels$|d_kv$|num_(query|attention)_groups$|attention_k_eq_v$",
}
"""By what keys describe: the pattern that such a key begins with. Most keys are those of models in transformers."""
_LISTS: Final = {"layer_types", "layers_block_type", "hybrid_override_pattern"}
"""Keys that tell which layers have a state, and so whether any has."""
_OF_THEIR_OWN: Final = ("shared layers", "heads")
_MAX_NAMED: Final = 8
_COMMON_KEYS: Final = ("num_key_value_heads", "head_dim")
_OTHER_SECTIONS: Final = re.compile(
    r"rope_|quantization_|compression_|vi(sion|sual|t|deo)|audio|image|speech|whisper|projector|talker|.*wav|depth|draft|mtp"
)
"""Sections of other models, and those that say nothing of the cache or are read apart from the layers."""
_FULL: Final = (None, 0, "full_attention", "attention")
"""Values of a layer of full attention in a list of layers."""
_FULL_BY_KEY: Final = {
    "attn_type_list": (1,),  # of MiniMax, where 0 is a state
    "full_attn_mod": (1,),  # of Phi: every layer
}


def check_ignored_keys(keys: Reader, rules: str, family: Family, layers: Sequence[Layer]) -> None:
    """Checks that the rules of an architecture, which have made the layers, read what changes the cache.

    Args:
        keys: The section of the language model that they have read.
        rules: The architecture.
        family: Its rules.
        layers: The layers.

    Raises:
        InvalidArgumentError: They ignore keys; names the first, and all with their values.
    """
    known = {*map(_topic, keys.read), ""} - {*_OF_THEIR_OWN}
    if family.is_latent or not any(isinstance(layer.spec, AttentionSpec) for layer in layers):
        known |= {"heads", "latent vectors"}
    if keys.read & _LISTS:
        known.add("states")
    ignored = [
        (keys.field(path), value)
        for path, key, value in _stated(keys.values, keys.read)
        if path not in keys.read
        and key not in family.ignored
        and _topic(key) not in known
        and not _changes_nothing(key, value, keys.values)
    ]
    if ignored:
        named = ", ".join(f"{path} = {str(value)[:QUOTED_CHARACTERS]}" for path, value in ignored[:_MAX_NAMED])
        message = f"changes the cache, but the rules of {rules} do not read it ({named}): describe the layers in a file"
        raise InvalidArgumentError(ignored[0][0], message, reason="IGNORED_KEY")


def _topic(key: str) -> str:
    """Returns what a key describes; empty if it does not change the cache."""
    return next((topic for topic, pattern in _TOPICS.items() if re.match(pattern, key)), "")


def _stated(
    values: Mapping[str, object], read: AbstractSet[str], prefix: str = ""
) -> Iterator[tuple[str, str, object]]:
    """Yields the path, the key and the value of each key, those of unread sections without a topic included."""
    for key, value in values.items():
        if not isinstance(value, dict) or _topic(key):
            yield prefix + key, key, value
        elif not _OTHER_SECTIONS.match(key) and prefix + key not in read:
            yield from _stated(value, read, f"{prefix}{key}.")


def _changes_nothing(key: str, value: object, values: Mapping[str, object]) -> bool:
    if any(key in names and values.get(name) == value for name, names in SPELLINGS.items()):
        return True
    full = _FULL_BY_KEY.get(key, _FULL)
    if not value or all(item in full for item in (value if isinstance(value, list) else [value])):
        return True
    topic = _topic(key)
    if topic == "shared layers" and values.get("use_cla") is False:
        return True
    if topic == "windows":
        kinds = values.get("layer_types")
        return values.get("use_sliding_window") is False or (bool(kinds) and _changes_nothing("", kinds, {}))
    if topic not in ("heads", "latent vectors"):
        return False
    return any(key.endswith(name) and value == values.get(name) for name in _COMMON_KEYS)
