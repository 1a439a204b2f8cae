"""Derives the specs of a model's layers from its config.json.

Rule 1: an architecture is one function that reads the config, and one row of FAMILIES.
Rule 2: no value is guessed silently. A missing key is an error or a note, unless the model's own config class defines a
default.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import MambaSpec
from kvpool.models import attention, latent, mamba, whisper
from kvpool.models.context import DEFAULT_BLOCK_SIZE, Context, Layer, Model, ModelOptions
from kvpool.models.dtypes import kv_dtype, model_dtype
from kvpool.models.ignored_keys import check_ignored_keys
from kvpool.models.length import stated_length
from kvpool.models.reader import Reader

__all__ = ["FAMILIES", "Model", "ModelOptions", "derive_model", "split_stages"]

_SECTIONS: Final = ("text_config", "language_config", "llm_config")
"""Sections that hold the language model in configs of multimodal models."""
_EXAMPLE: Final = (
    '{"layers": {"model.layers.0.self_attn.attn": {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8,'
    ' "head_size": 128, "dtype": "bfloat16"}}}'
)


class Family(NamedTuple):
    """Rules to read the configs of one architecture.

    Attributes:
        derive: Makes the layers.
        length_key: Key of the maximum number of tokens of a request.
        assumed_length: Length if the key is absent; 0 for an error.
        count_key: Key of the number of decoder layers.
        kinds_key: Key of the kinds of all decoder layers, whose number comes before that at count_key; empty for none.
        defaults: Values of keys that the config may omit.
        encoder_length_key: Key of the maximum number of encoder output tokens; empty for models without an encoder.
        length_counts_scaling: Whether the length at length_key already includes the rotary scaling.
    """

    derive: Callable[[Context], list[Layer]]
    length_key: str = "max_position_embeddings"
    assumed_length: int = 0
    count_key: str = "num_hidden_layers"
    kinds_key: str = ""
    defaults: Mapping[str, object] = MappingProxyType({})
    encoder_length_key: str = ""
    length_counts_scaling: bool = False


_LLAMA: Final = Family(attention.llama)
_MISTRAL: Final = Family(attention.mistral)
_QWEN: Final = Family(attention.qwen)
_GEMMA3: Final = Family(attention.gemma3, defaults=attention.GEMMA3_DEFAULTS, length_counts_scaling=True)
_LLAMA4: Final = Family(attention.llama4)
_DEEPSEEK: Final = Family(latent.deepseek)
_QWEN3_NEXT: Final = Family(mamba.qwen3_next)

FAMILIES: Final[Mapping[str, tuple[str, Family]]] = {
    "LlamaForCausalLM": ("llama", _LLAMA),
    "MistralForCausalLM": ("mistral", _MISTRAL),
    "Mistral3ForConditionalGeneration": ("mistral3", _MISTRAL),
    "MixtralForCausalLM": ("mixtral", _MISTRAL),
    "Qwen2ForCausalLM": ("qwen2", _QWEN),
    "Qwen2MoeForCausalLM": ("qwen2_moe", _QWEN),
    "Qwen3ForCausalLM": ("qwen3", _QWEN),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _QWEN),
    "Phi3ForCausalLM": ("phi3", Family(attention.phi)),
    "Glm4ForCausalLM": ("glm4", _LLAMA),
    "Glm4MoeForCausalLM": ("glm4_moe", _LLAMA),
    "MiniMaxM2ForCausalLM": ("minimax_m2", _LLAMA),
    "GemmaForCausalLM": ("gemma", Family(attention.gemma)),
    "Gemma2ForCausalLM": ("gemma2", Family(attention.gemma2)),
    "Gemma3ForCausalLM": ("gemma3_text", _GEMMA3),
    "Gemma3ForConditionalGeneration": ("gemma3", _GEMMA3),
    "GptOssForCausalLM": ("gpt_oss", Family(attention.gpt_oss)),
    "Llama4ForCausalLM": ("llama4_text", _LLAMA4),
    "Llama4ForConditionalGeneration": ("llama4", _LLAMA4),
    "DeepseekV2ForCausalLM": ("deepseek_v2", _DEEPSEEK),
    "DeepseekV3ForCausalLM": ("deepseek_v3", _DEEPSEEK),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", _DEEPSEEK),
    "KimiK25ForConditionalGeneration": ("kimi_k25", _DEEPSEEK),
    "DeepseekV32ForCausalLM": ("deepseek_v32", Family(latent.deepseek_v32)),
    "MambaForCausalLM": ("mamba", Family(mamba.mamba1, assumed_length=2048)),
    "Mamba2ForCausalLM": ("mamba2", Family(mamba.mamba2, assumed_length=2048)),
    "JambaForCausalLM": ("jamba", Family(mamba.jamba)),
    "BambaForCausalLM": ("bamba", Family(mamba.bamba)),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", Family(mamba.granite_hybrid)),
    "NemotronHForCausalLM": ("nemotron_h", Family(mamba.nemotron_h, kinds_key="layers_block_type")),
    "Qwen3NextForCausalLM": ("qwen3_next", _QWEN3_NEXT),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", _QWEN3_NEXT),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", _QWEN3_NEXT),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", _QWEN3_NEXT),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", _QWEN3_NEXT),
    "WhisperForConditionalGeneration": (
        "whisper",
        Family(
            whisper.whisper,
            length_key="max_target_positions",
            count_key="decoder_layers",
            encoder_length_key="max_source_positions",
        ),
    ),
}
"""By architecture: the model_type that identifies it if a config names no architecture, and its family."""

_ARCHITECTURES: Final = {model_type: name for name, (model_type, _) in FAMILIES.items()}


def derive_model(config: Mapping[str, object], options: ModelOptions, *, like: str = "") -> Model:
    """Derives the specs of a model's layers.

    Args:
        config: A parsed config.json.
        options: How the model is run.
        like: Known architecture whose rules apply, whatever the config names; empty for the config's own.

    Raises:
        InvalidArgumentError: The architecture is unknown; or a key is missing, malformed or in conflict with an option;
            or a key changes the cache, and the rules of `like` do not read it. Its field is the key's dotted path or
            the option.
    """
    top = Reader(config)
    section = _language_model(top)
    architecture, family = _family_like(like, top) if like else _family(top, section)
    stated = {key: value for key, value in section.values.items() if value is not None}
    keys = Reader({**family.defaults, **stated}, section.path)
    notes = [f"the config is read as that of {like}, as requested"] if like else []
    dtype = model_dtype(keys, top, notes)
    ctx = Context(
        keys=keys,
        options=options,
        model_dtype=dtype,
        kv_dtype=kv_dtype(options.kv_dtype, dtype, (top, section), notes),
        max_model_len=_max_model_len(keys, family, options, notes),
        notes=notes,
    )
    has_kinds = family.kinds_key and keys.has(family.kinds_key)
    num_hidden_layers = len(keys.texts(family.kinds_key)) if has_kinds else keys.layers(family.count_key)
    layers = family.derive(ctx)
    if like:
        check_ignored_keys(Reader(stated, section.path, keys.read), like)
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
    return top.section(key) if key else top


def _named_architecture(keys: Reader) -> str:
    names = keys.texts("architectures") if keys.has("architectures") else []
    return names[0] if names else ""


def _family_like(like: str, top: Reader) -> tuple[str, Family]:
    if like not in FAMILIES:
        raise InvalidArgumentError("like", f"{like!r} is not known. Known architectures: {', '.join(FAMILIES)}")
    return _named_architecture(top) or like, FAMILIES[like][1]


def _family(top: Reader, section: Reader) -> tuple[str, Family]:
    """Finds the family by the names of the whole model, then by those of its language model."""
    for keys in (top, section):
        name = _named_architecture(keys) or _ARCHITECTURES.get(keys.text("model_type", ""), "")
        if name in FAMILIES:
            return _named_architecture(top) or name, FAMILIES[name][1]
    name = _named_architecture(top) or top.text("model_type", "")
    problem = f"{name!r} is not known" if name else "it states neither architectures nor model_type"
    raise InvalidArgumentError(
        "architectures",
        f"{problem}. If its layers are as those of a known architecture, name that: --like ARCHITECTURE. Otherwise"
        f" describe its layers in a file: --layers FILE, with {_EXAMPLE}. Known architectures: {', '.join(FAMILIES)}",
        reason="UNKNOWN_ARCHITECTURE",
    )


def _max_model_len(keys: Reader, family: Family, options: ModelOptions, notes: list[str]) -> int:
    if keys.has(family.length_key) or not family.assumed_length:
        stated = stated_length(keys, family.length_key, notes, counts_scaling=family.length_counts_scaling)
    else:
        stated = family.assumed_length
        notes.append(f"the config states no {family.length_key}; {stated} is assumed")
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
