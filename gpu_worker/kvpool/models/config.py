"""From a model's config.json to what each of its layers keeps.

Rule 1: an architecture is one function, which reads the config, and one row of FAMILIES.
Rule 2: nothing is guessed in silence: what a config leaves out is an error or a note, unless the model's own config
class says what it stands for.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvpool.models import attention, gemma3, latent, mamba, whisper
from kvpool.models.context import Context, Layer, Model, ModelOptions
from kvpool.models.reader import Reader, typed
from kvpool.server.core.errors import InvalidArgumentError
from kvpool.server.core.specs import KVCacheSpec, dtype_size_bytes

__all__ = ["FAMILIES", "Model", "ModelOptions", "derive_model", "split_stages"]

_SECTIONS: Final = ("text_config", "language_config", "llm_config")
"""Where configs of models of more than text keep the language model's part."""
_DTYPE_KEYS: Final = ("torch_dtype", "dtype")
_EXAMPLE: Final = (
    '{"layers": {"model.layers.0.self_attn.attn": {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8,'
    ' "head_size": 128, "dtype": "bfloat16"}}}'
)


class Family(NamedTuple):
    """How the configs of one architecture are read.

    Attributes:
        derive: Makes the layers.
        length_key: States the most tokens of a request.
        assumed_length: What to take where it does not; 0 for an error.
        count_key: States the number of decoder layers.
        defaults: What the config may leave out.
        encoder_length_key: States the most tokens that an encoder puts out; empty for models without one.
    """

    derive: Callable[[Context], list[Layer]]
    length_key: str = "max_position_embeddings"
    assumed_length: int = 0
    count_key: str = "num_hidden_layers"
    defaults: Mapping[str, object] = MappingProxyType({})
    encoder_length_key: str = ""


_LLAMA: Final = Family(attention.llama)
_MISTRAL: Final = Family(attention.mistral)
_QWEN: Final = Family(attention.qwen)
_GEMMA3: Final = Family(gemma3.gemma3, defaults=gemma3.DEFAULTS)
_LLAMA4: Final = Family(attention.llama4)
_DEEPSEEK: Final = Family(latent.deepseek)

FAMILIES: Final[Mapping[str, tuple[str, Family]]] = {
    "LlamaForCausalLM": ("llama", _LLAMA),
    "MistralForCausalLM": ("mistral", _MISTRAL),
    "Mistral3ForConditionalGeneration": ("mistral3", _MISTRAL),
    "MixtralForCausalLM": ("mixtral", _MISTRAL),
    "Qwen2ForCausalLM": ("qwen2", _QWEN),
    "Qwen2MoeForCausalLM": ("qwen2_moe", _QWEN),
    "Qwen3ForCausalLM": ("qwen3", _QWEN),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _QWEN),
    "GemmaForCausalLM": ("gemma", Family(attention.gemma)),
    "Gemma2ForCausalLM": ("gemma2", Family(attention.gemma2)),
    "Gemma3ForCausalLM": ("gemma3_text", _GEMMA3),
    "Gemma3ForConditionalGeneration": ("gemma3", _GEMMA3),
    "GptOssForCausalLM": ("gpt_oss", Family(attention.gpt_oss)),
    "Llama4ForCausalLM": ("llama4_text", _LLAMA4),
    "Llama4ForConditionalGeneration": ("llama4", _LLAMA4),
    "DeepseekV2ForCausalLM": ("deepseek_v2", _DEEPSEEK),
    "DeepseekV3ForCausalLM": ("deepseek_v3", _DEEPSEEK),
    "DeepseekV32ForCausalLM": ("deepseek_v32", Family(latent.deepseek_v32)),
    "MambaForCausalLM": ("mamba", Family(mamba.mamba1, assumed_length=2048)),
    "Mamba2ForCausalLM": ("mamba2", Family(mamba.mamba2, assumed_length=2048)),
    "JambaForCausalLM": ("jamba", Family(mamba.jamba)),
    "BambaForCausalLM": ("bamba", Family(mamba.bamba)),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", Family(mamba.granite_hybrid)),
    "NemotronHForCausalLM": ("nemotron_h", Family(mamba.nemotron_h)),
    "Qwen3NextForCausalLM": ("qwen3_next", Family(mamba.qwen3_next)),
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
"""By architecture: the model_type that stands for it where a config names no architecture, and how it is read."""

_BY_MODEL_TYPE: Final = dict(FAMILIES.values())


def derive_model(config: Mapping[str, object], options: ModelOptions) -> Model:
    """Derives what each layer keeps.

    Args:
        config: A config.json, parsed.
        options: How the model is to be run.

    Raises:
        InvalidArgumentError: The architecture is unknown, or a key is missing, malformed or at odds with an option;
            its field is the key's dotted path or the option.
    """
    top = Reader(config)
    section = _language_model(top)
    architecture, family = _family(top, section)
    stated = {key: value for key, value in section.values.items() if value is not None}
    keys = Reader({**family.defaults, **stated}, section.path)
    notes: list[str] = []
    ctx = Context(
        keys=keys,
        options=options,
        model_dtype=_model_dtype(keys, top, notes),
        max_model_len=_max_model_len(keys, family, options, notes),
        notes=notes,
    )
    num_hidden_layers = keys.layers(family.count_key)
    layers = family.derive(ctx)
    return Model(
        architecture=architecture,
        model_type=top.text("model_type") if top.has("model_type") else "",
        max_model_len=ctx.max_model_len,
        layers=tuple((layer.name, layer.spec) for layer in layers),
        layer_indices=tuple(layer.index for layer in layers),
        num_hidden_layers=num_hidden_layers,
        notes=tuple(notes),
        max_encoder_tokens=keys.tokens(family.encoder_length_key) if family.encoder_length_key else 0,
    )


def split_stages(model: Model, pipeline_parallel_size: int) -> list[dict[str, KVCacheSpec]]:
    """Splits the layers over the stages of a pipeline, as vLLM's get_pp_indices does.

    Each stage has num_hidden_layers // pipeline_parallel_size; what is left over goes one each to the last stages but
    the very last, which also has the output layer.

    Raises:
        InvalidArgumentError: A stage would have no layer.
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


def _family(top: Reader, section: Reader) -> tuple[str, Family]:
    """Finds the family by the whole model's names, then by those of its language model."""
    for keys in (top, section):
        if name := _named_architecture(keys):
            if name in FAMILIES:
                return _named_architecture(top) or name, FAMILIES[name][1]
        elif keys.has("model_type") and (model_type := keys.text("model_type")) in _BY_MODEL_TYPE:
            family = _BY_MODEL_TYPE[model_type]
            return _named_architecture(top) or _architecture_of(model_type), family
    name = _named_architecture(top) or (top.text("model_type") if top.has("model_type") else "")
    problem = f"{name!r} is not known" if name else "neither architectures nor model_type is stated"
    raise InvalidArgumentError(
        "architectures",
        f"{problem}; known: {', '.join(FAMILIES)}. The layers of other models can be given in a file: --layers FILE,"
        f" with {_EXAMPLE}",
        reason="UNKNOWN_ARCHITECTURE",
    )


def _architecture_of(model_type: str) -> str:
    return next(name for name, (known, _) in FAMILIES.items() if known == model_type)


def _model_dtype(keys: Reader, top: Reader, notes: list[str]) -> str:
    """The activations' type; as vLLM does, bfloat16 where weights are float32 or none is stated."""
    for reader in (keys, top):
        for key in _DTYPE_KEYS:
            if not reader.has(key):
                continue
            dtype = typed(reader.field(key), reader.values[key], str).removeprefix("torch.")
            dtype_size_bytes(reader.field(key), dtype)
            if dtype != "float32":
                return dtype
            notes.append(f"{reader.field(key)} is float32; the model is taken to run in bfloat16")
            return "bfloat16"
    notes.append("the config states no torch_dtype; the model is taken to run in bfloat16")
    return "bfloat16"


def _max_model_len(keys: Reader, family: Family, options: ModelOptions, notes: list[str]) -> int:
    if options.max_model_len:
        stated = keys.tokens(family.length_key) if keys.has(family.length_key) else options.max_model_len
        if options.max_model_len > stated:
            notes.append(f"max_model_len {options.max_model_len} is more than {family.length_key} {stated}")
        return options.max_model_len
    if family.assumed_length and not keys.has(family.length_key):
        notes.append(f"the config states no {family.length_key}; max_model_len is taken to be {family.assumed_length}")
        return family.assumed_length
    return keys.tokens(family.length_key)
