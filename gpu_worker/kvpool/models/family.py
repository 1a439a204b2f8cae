"""What the name of an architecture decides beside the keys of its config."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvpool.models.context import Context, Layer
from kvpool.models.reader import Reader


class Family(NamedTuple):
    """Rules of architectures that read the same keys in the same way.

    Attributes:
        cycle: Kinds of the first layers, one letter each, which repeat if no key states the kinds: see
            `kinds.LETTERS`. Empty for full attention, or windows if the config has one.
        kinds_key: Key that must state the kinds of layers, if a config may not omit them.
        adapt: Makes values of keys from others, for configs that spell them in a way of their own; None for none.
        defaults: Values of keys that the config may omit.
        is_latent: Whether layers keep one latent vector per token, instead of keys and values.
        has_indexer: Whether a layer also keeps the key of an indexer.
        num_copies: Number of attention layers in each decoder layer.
        window_offset: Tokens by which the window exceeds the number in the config.
        has_value_heads: Whether heads of values may have a size of their own.
        count_key: Key of the number of decoder layers, if `derive` makes them.
        length_key: Key of the maximum number of tokens of a request, for errors.
        encoder_length_key: Key of the maximum number of encoder output tokens; empty for models without an encoder.
        assumed_length: Maximum number of tokens of a request if the config states none; 0 for an error.
        length_counts_scaling: Whether the stated length already includes the rotary scaling.
        ignored: Keys that vLLM does not read for this architecture, although they would change the cache.
        derive: Makes the layers, if the decoder's rules do not; None for these.
    """

    cycle: str = ""
    kinds_key: str = ""
    adapt: Callable[[Reader], Mapping[str, object]] | None = None
    defaults: Mapping[str, object] = MappingProxyType({})
    is_latent: bool = False
    has_indexer: bool = False
    num_copies: int = 1
    window_offset: int = 0
    has_value_heads: bool = False
    count_key: str = ""
    length_key: str = "max_position_embeddings"
    encoder_length_key: str = ""
    assumed_length: int = 0
    length_counts_scaling: bool = False
    ignored: tuple[str, ...] = ()
    derive: Callable[[Context], list[Layer]] | None = None
