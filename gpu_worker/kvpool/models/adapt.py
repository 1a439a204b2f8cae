"""Values of keys that follow from others, for architectures that spell them in a way of their own.

Each function reads the keys of one architecture, and returns what `decoder` asks for.
"""

from collections.abc import Mapping
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.models.reader import Reader

Values = Mapping[str, object]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"
_LLAMA4_FULL_EVERY: Final = 4


def falcon(keys: Reader) -> Values:
    """Falcon: one head of keys and values, unless it has the newer form or no multi-query attention."""
    is_stated = keys.has("num_key_value_heads")
    if not keys.flag("new_decoder_architecture", default=False) and keys.flag("multi_query", default=True):
        return {"num_key_value_heads": 1}
    return {} if is_stated else {"num_key_value_heads": keys.dimension("num_attention_heads")}


def multi_query(keys: Reader) -> Values:
    """GPT BigCode: one head of keys and values for all, or one for each head of queries."""
    return {"num_key_value_heads": 1} if keys.flag("multi_query", default=True) else {}


def one_head(keys: Reader) -> Values:
    """Step 3: one head of keys and values, whatever the config says of groups."""
    keys.has("num_attention_groups")
    return {"num_key_value_heads": 1}


def dbrx(keys: Reader) -> Values:
    """DBRX: heads of keys and values in a section of their own."""
    section = keys.section("attn_config")
    return {"num_key_value_heads": section.dimension("kv_n_heads")} if section.has("kv_n_heads") else {}


def chatglm(keys: Reader) -> Values:
    """ChatGLM: groups count only with multi-query attention."""
    if keys.flag("multi_query_attention", default=False):
        return {}
    return {"num_key_value_heads": keys.dimension("num_attention_heads")}


def expanded_latents(keys: Reader) -> Values:
    """MiniCPM 3: latent vectors are expanded to heads before they are cached."""
    size = keys.dimension("qk_nope_head_dim") + keys.dimension("qk_rope_head_dim")
    for ignored in ("kv_lora_rank", "v_head_dim", "qk_head_dim", "num_key_value_heads"):
        keys.has(ignored)
    return {"num_key_value_heads": keys.dimension("num_attention_heads"), "head_dim": size}


def gemma4(keys: Reader) -> Values:
    """Gemma 4: full attention on every 6th layer and on the last one, with heads of another size.

    They are also of another number only if keys and values are the same.
    """
    numbers = range(1, keys.layers("num_hidden_layers") + 1)
    kinds = keys.texts("layer_types") if keys.has("layer_types") else [SLIDING if i % 6 else FULL for i in numbers]
    values: dict[str, object] = {"layer_types": [*kinds[:-1], FULL]}
    if keys.text("use_bidirectional_attention", "") == "all":  # with a window on both sides
        values["sliding_window"] = keys.tokens("sliding_window") // 2 + 1
    if keys.has("per_layer_config"):  # as transformers writes them
        return {**values, "global_head_dim": None, "num_global_key_value_heads": None}
    if keys.flag("attention_k_eq_v", default=False):
        return values
    keys.has("num_global_key_value_heads")
    return {**values, "num_global_key_value_heads": None}


def llama4(keys: Reader) -> Values:
    """Llama 4: chunks on the layers with rotary embedding, full attention on those without (by default every 4th)."""
    count = keys.layers("num_hidden_layers")
    rotary = keys.integers("no_rope_layers") if keys.has("no_rope_layers") else []
    if rotary and len(rotary) != count:
        raise InvalidArgumentError(keys.field("no_rope_layers"), f"names {len(rotary)} layers, not {count}")
    if not keys.has("attention_chunk_size"):
        return {"layer_types": [FULL] * count}
    if not rotary and keys.has("layer_types"):
        return {}
    every = keys.layers("no_rope_layer_interval", _LLAMA4_FULL_EVERY)
    rotary = rotary or [(i + 1) % every for i in range(count)]
    return {"layer_types": [CHUNKED if is_rotary else FULL for is_rotary in rotary]}


def zamba2(keys: Reader) -> Values:
    """Zamba 2: attention reads two embeddings side by side."""
    if keys.has("attention_head_dim"):
        return {}
    return {"attention_head_dim": 2 * keys.dimension("hidden_size") // keys.dimension("num_attention_heads")}


def olmo_hybrid(keys: Reader) -> Values:
    """OLMo hybrid: delta nets have as many heads as attention, and values twice as large as keys."""
    heads = keys.dimension("num_attention_heads")
    key_heads = keys.dimension("linear_num_key_heads", heads)
    key_size = keys.dimension("linear_key_head_dim", 3 * keys.dimension("hidden_size") // (4 * key_heads) or 1)
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": keys.dimension("linear_num_value_heads", heads),
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": keys.dimension("linear_value_head_dim", 2 * key_size),
    }


def kimi_linear(keys: Reader) -> Values:
    """Kimi Linear: lists the numbers of its layers, from 1."""
    section = keys.section("linear_attn_config")
    count = keys.layers("num_hidden_layers")
    attend = {i - 1 for i in section.integers("full_attn_layers")}
    for i in attend:
        if not 0 <= i < count:
            raise InvalidArgumentError(section.field("full_attn_layers"), f"{i + 1} is not in [1, {count}]")
    return {"layer_types": [FULL if i in attend else LINEAR for i in range(count)]}


def layer_groups(keys: Reader) -> Values:
    """Bailing: full attention on the last layer of each group; the layers after the last whole group differ."""
    count, size = keys.layers("num_hidden_layers"), keys.layers("layer_group_size", 1)
    return {"layer_types": [LINEAR if (i + 1) % size else FULL for i in range(count)]}


def layer_groups_and_rest(keys: Reader) -> Values:
    """Bailing 3: as `layer_groups`, with full attention after the last whole group."""
    count, size = keys.layers("num_hidden_layers"), keys.layers("layer_group_size", 1)
    whole = count // size * size
    return {"layer_types": [LINEAR if (i + 1) % size and i < whole else FULL for i in range(count)]}


def loops(keys: Reader) -> Values:
    """IQuest LoopCoder: computes its layers several times, from the second time on with a window."""
    count, num_loops = keys.layers("num_hidden_layers"), keys.layers("loop_num", 1)
    kinds = [FULL] * count + [SLIDING] * (count * (num_loops - 1))
    return {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": keys.tokens("loop_window_size")}


def cycles(keys: Reader) -> Values:
    """HRM: computes two stacks in turns; each turn has layers with a cache of their own."""
    turns = keys.layers("H_cycles") * (keys.layers("L_cycles") + 1)
    heads = keys.dimension("num_attention_heads")
    return {"num_hidden_layers": turns * keys.layers("num_layers_per_stack"), "num_key_value_heads": heads}


def blocks(keys: Reader) -> Values:
    """Nemotron-NAS: each layer has heads of its own, or no attention."""
    heads = keys.dimension("num_attention_heads")
    kinds: list[str] = []
    own: dict[str, object] = {}
    for i, block in enumerate(keys.sections("block_configs")):
        attention = block.section("attention")
        is_left_out = attention.flag("no_op", default=False) or attention.flag("replace_with_linear", default=False)
        kinds.append("mlp" if is_left_out else FULL)
        if not is_left_out:
            own[str(i)] = {"num_key_value_heads": max(heads // attention.dimension("n_heads_in_group"), 1)}
    return {"layer_types": kinds, "per_layer_config": own}
