"""What goes into the derivation of a model's specs, and what comes out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.base import MAX_BLOCK_SIZE_TOKENS, KVCacheSpec
from kvpool.models.reader import Reader

DEFAULT_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is to be run.

    Attributes:
        block_size: Tokens a block of attention holds; hybrids may need more.
        kv_dtype: Element type of keys and values as torch spells it; "" or "auto" for what the checkpoint was quantized
            to, else the model's own; "fp8" for float8_e4m3fn, "fp8_ds_mla" for the layout of 656 bytes a token that
            multi-head latent attention has.
        tensor_parallel_size: Ranks over which the heads of a layer are spread.
        max_model_len: Most tokens of a request; 0 for what the config states.
        mamba_caching: Whether Mamba states are kept at block boundaries, to be found again by a prefix.
        num_speculative_tokens: Draft tokens of a step; each keeps a state of its own in Mamba layers.
        decode_context_parallel_size: Of the tensor-parallel ranks, how many spread a request's tokens.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    kv_dtype: str = ""
    tensor_parallel_size: int = 1
    max_model_len: int = 0
    mamba_caching: bool = False
    num_speculative_tokens: int = 0
    decode_context_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_range("block_size", self.block_size, 1, MAX_BLOCK_SIZE_TOKENS)
        check_range("tensor_parallel_size", self.tensor_parallel_size, 1, 65_536)
        check_range("max_model_len", self.max_model_len, 0, MAX_TOKENS)
        check_range("num_speculative_tokens", self.num_speculative_tokens, 0, 1024)
        check_range("decode_context_parallel_size", self.decode_context_parallel_size, 1, 1024)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer that keeps something.

    Attributes:
        index: Number of the decoder layer that it is part of.
        name: Its name in the engine.
        spec: What it keeps on one tensor-parallel rank.
    """

    index: int
    name: str
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class Model:
    """What a model keeps.

    Attributes:
        architecture: The class that the config names.
        model_type: The config's own name for the family; empty if it has none.
        max_model_len: Most tokens of a request.
        layers: Name and spec of each layer that keeps something, in the order in which they run. The specs are those
            of one tensor-parallel rank.
        layer_indices: Number of the decoder layer that each belongs to. What runs ahead of the decoder has 0.
        num_hidden_layers: Decoder layers, those that keep nothing included.
        notes: Remarks for the reader, such as how a block size came about.
        max_encoder_tokens: Most tokens that an encoder puts out for a request; 0 without one.
    """

    architecture: str
    model_type: str
    max_model_len: int
    layers: tuple[tuple[str, KVCacheSpec], ...]
    layer_indices: tuple[int, ...]
    num_hidden_layers: int
    notes: tuple[str, ...]
    max_encoder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """What a family's function reads.

    Attributes:
        keys: The config's part on the language model.
        options: How the model is to be run.
        model_dtype: Element type of the model's activations.
        kv_dtype: Element type of keys and values, or "fp8_ds_mla".
        max_model_len: Most tokens of a request.
        notes: Remarks; the function adds its own.
    """

    keys: Reader
    options: ModelOptions
    model_dtype: str
    kv_dtype: str
    max_model_len: int
    notes: list[str] = field(default_factory=list)

    def shard(self, name: str, count: int) -> int:
        """One rank's part of what all ranks share evenly.

        Args:
            name: The key that states the count, or what the count is of.
            count: Of the whole model.

        Raises:
            InvalidArgumentError: It does not come out even.
        """
        ranks = self.options.tensor_parallel_size
        if count % ranks:
            raise InvalidArgumentError(
                "tensor_parallel_size", f"{self.keys.field(name)} is {count}, which {ranks} ranks (--tp) cannot share"
            )
        return count // ranks

    def shard_or_replicate(self, name: str, count: int) -> int:
        """One rank's part of heads or groups; where there are fewer than ranks, several ranks hold the same one.

        Raises:
            InvalidArgumentError: Neither number is a multiple of the other.
        """
        ranks = self.options.tensor_parallel_size
        if count < ranks and ranks % count == 0:
            return 1
        return self.shard(name, count)

    def shard_kv_heads(self, name: str, count: int) -> int:
        """One rank's key and value heads.

        Raises:
            InvalidArgumentError: As `shard_or_replicate`; or context parallelism is asked of ranks whose heads differ,
                each of which needs every token.
        """
        heads = self.shard_or_replicate(name, count)
        ranks, spread = self.options.tensor_parallel_size, self.options.decode_context_parallel_size
        if spread > 1 and spread * count > ranks:
            raise InvalidArgumentError(
                "decode_context_parallel_size",
                f"{spread} ranks (--dcp) cannot spread the tokens of a head: of {ranks} ranks (--tp),"
                f" {max(ranks // count, 1)} hold the same one ({self.keys.field(name)} is {count})",
            )
        return heads


@contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Puts the layer's name before the field of what its spec refuses."""
    try:
        yield
    except InvalidArgumentError as error:
        error.rename_field(f'layers["{name}"].{error.field}')
        raise
