"""Inputs and results of the derivation of a model's specs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kvpool.core.errors import InvalidArgumentError, check_range, fields_renamed
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.base import MAX_BLOCK_SIZE_TOKENS, AttentionSpec, KVCacheSpec
from kvpool.models.reader import Reader

DEFAULT_BLOCK_SIZE: Final = 16


class Backend(NamedTuple):
    """Blocks of an attention backend of vLLM.

    Attributes:
        block_size: Tokens of a block unless another size is requested.
        step: Tokens of the smallest block of its kernels.
    """

    block_size: int
    step: int


BACKENDS: Final[Mapping[str, Backend]] = {
    "FLASH_ATTN": Backend(16, 16),
    "FLASHINFER": Backend(16, 16),
    "TRITON_ATTN": Backend(16, 16),
    "FLEX_ATTENTION": Backend(16, 16),
    "FLASH_ATTN_MLA": Backend(16, 16),
    "TRITON_MLA": Backend(16, 16),
    "FLASHINFER_MLA": Backend(32, 32),
    "FLASHMLA": Backend(64, 64),
    "FLASHMLA_SPARSE": Backend(64, 64),
    "FLASHINFER_MLA_SPARSE": Backend(64, 64),
    "FLASHMLA_SPARSE_DSV4": Backend(256, 256),
    "CUTLASS_MLA": Backend(128, 128),
    "CPU_ATTN": Backend(128, 32),
    "CPU_MLA": Backend(16, 16),
}
"""By name in vLLM 0.32; blocks of the sparse ones suit the indexer, too."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options with which a model is run.

    Attributes:
        block_size: Tokens per block of attention; hybrid models may need more.
        kv_dtype: Element type of keys and values as torch spells it; "" or "auto" for the type that the checkpoint was
            quantized to, else the model's type; "fp8" for float8_e4m3fn; or a packed type of `PACKINGS` by its name in
            vLLM.
        tensor_parallel_size: Number of ranks that share the heads of a layer.
        max_model_len: Maximum number of tokens of a request; 0 for the length in the config.
        mamba_caching: Whether Mamba states are kept at block boundaries, for prefix caching.
        num_speculative_tokens: Draft tokens per step; each has its own state in Mamba layers.
        decode_context_parallel_size: Number of tensor-parallel ranks over which a request's tokens are spread.
        backend: Attention backend of vLLM, which has smallest blocks of its own (`BACKENDS`); empty for one with
            blocks of 16 tokens.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    kv_dtype: str = ""
    tensor_parallel_size: int = 1
    max_model_len: int = 0
    mamba_caching: bool = False
    num_speculative_tokens: int = 0
    decode_context_parallel_size: int = 1
    backend: str = ""

    def __post_init__(self) -> None:
        check_range("block_size", self.block_size, 1, MAX_BLOCK_SIZE_TOKENS)
        check_range("tensor_parallel_size", self.tensor_parallel_size, 1, 65_536)
        check_range("max_model_len", self.max_model_len, 0, MAX_TOKENS)
        check_range("num_speculative_tokens", self.num_speculative_tokens, 0, 1024)
        check_range("decode_context_parallel_size", self.decode_context_parallel_size, 1, 1024)
        if self.backend and self.backend not in BACKENDS:
            raise InvalidArgumentError("backend", f"{self.backend!r} is not known; known: {', '.join(BACKENDS)}")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with a cache.

    Attributes:
        index: Number of the decoder layer that contains it.
        name: Name of the layer in the engine.
        spec: Spec of the layer on one tensor-parallel rank.
    """

    index: int
    name: str
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class Model:
    """The layers of a model and their specs.

    Attributes:
        architecture: Class name in the config.
        model_type: Name of the family in the config; empty if absent.
        max_model_len: Maximum number of tokens of a request.
        layers: Name and spec of each layer with a cache, in execution order. The specs are those of one
            tensor-parallel rank.
        layer_indices: Number of the decoder layer that contains each layer; 0 for layers before the decoder.
        num_hidden_layers: Number of decoder layers, including those without a cache.
        notes: Notes for the user, such as the reason for a block size.
        max_encoder_tokens: Maximum number of encoder output tokens of a request; 0 without an encoder.
    """

    architecture: str
    model_type: str
    max_model_len: int
    layers: tuple[tuple[str, KVCacheSpec], ...]
    layer_indices: tuple[int, ...]
    num_hidden_layers: int
    notes: tuple[str, ...]
    max_encoder_tokens: int = 0

    @property
    def packs_pages(self) -> bool:
        """Whether blocks must be outermost: kernels for states of several tokens read pages that lie side by side."""
        return any(isinstance(spec, AttentionSpec) and spec.tokens_per_state > 1 for _, spec in self.layers)

    def named(self, architecture: str, num_hidden_layers: int, notes: tuple[str, ...]) -> "Model":
        """Returns the model with what only its config says."""
        return replace(self, architecture=architecture, num_hidden_layers=num_hidden_layers, notes=notes)


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs of a family's function.

    Attributes:
        keys: The language model's section of the config.
        options: Options with which the model is run.
        model_dtype: Element type of the model's activations.
        kv_dtype: Element type of keys and values, or a type of `PACKINGS`.
        max_model_len: Maximum number of tokens of a request.
        notes: Notes; the function appends its own.
    """

    keys: Reader
    options: ModelOptions
    model_dtype: str
    kv_dtype: str
    max_model_len: int
    notes: list[str] = field(default_factory=list)

    @property
    def block_step(self) -> int:
        """Tokens of the smallest block of the attention backend's kernels."""
        return BACKENDS[self.options.backend].step if self.options.backend else DEFAULT_BLOCK_SIZE

    def note(self, sentence: str) -> None:
        """Adds a note, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def shard(self, where: str, count: int) -> int:
        """Divides a count evenly over the tensor-parallel ranks.

        Args:
            where: Path of the count, for errors.
            count: Count of the whole model.

        Raises:
            InvalidArgumentError: The number of ranks does not divide the count.
        """
        ranks = self.options.tensor_parallel_size
        if count % ranks:
            raise InvalidArgumentError(
                "tensor_parallel_size", f"{where} is {count}, which {ranks} ranks (--tp) cannot divide"
            )
        return count // ranks

    def shard_kv_heads(self, where: str, count: int) -> int:
        """Number of key and value heads of one rank; if there are fewer than ranks, several ranks hold the same one.

        Raises:
            InvalidArgumentError: Neither number is a multiple of the other; or context parallelism includes ranks with
                different heads, and every head needs every token.
        """
        ranks, spread = self.options.tensor_parallel_size, self.options.decode_context_parallel_size
        heads = 1 if count < ranks and ranks % count == 0 else self.shard(where, count)
        if spread > 1 and spread * count > ranks:
            raise InvalidArgumentError(
                "decode_context_parallel_size",
                f"{spread} ranks (--dcp) cannot spread the tokens of a head: of {ranks} ranks (--tp),"
                f" {max(ranks // count, 1)} hold the same one ({where} is {count})",
            )
        return heads


def make_layer(index: int, name: str, make_spec: Callable[[], KVCacheSpec]) -> Layer:
    """Makes a layer. The field of an error of its spec is prefixed with the layer's name."""
    with fields_renamed(lambda field: f'layers["{name}"].{field}'):
        return Layer(index, name, make_spec())
