"""What decides a pool's answers: groups, order of reuse, hash scheme. Frozen values that check their own numbers."""

import hmac
import math
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_BLOCKS, MAX_TOKENS, GroupId, PoolName
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    MAX_LAYERS,
    SPEC_KINDS,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    allocation_spec,
    block_span_tokens,
    common_multiple_tokens,
    num_sink_tokens,
)

_NAME: Final = re.compile(r"[A-Za-z0-9._/-]{1,128}")
MAX_GROUPS: Final = 256
MAX_BLOCK_SPANS: Final = 8
"""A request keeps the joined hashes of each larger block size beside its own."""
_HASH_SIZES_BYTES: Final = {"sha256_cbor": 32, "xxhash_cbor": 16}


class ReuseOrder(Enum):
    """In which order freed blocks are used again."""

    UNCACHED_FIRST = "uncached_first"
    """Of the blocks freed together, those without a hash go to the head of the free list, the others to the tail.

    With caching off all go to the head. As vLLM 0.32.
    """

    LRU = "lru"
    """All go to the tail, in the order they are freed. As vLLM 0.14.1."""


class KeyForm(Enum):
    """How a block's extra keys enter its hash."""

    TAGGED = "tagged"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table."""

    spec: KVCacheSpec
    layer_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How the sessions of a pool hash their blocks.

    Attributes:
        algorithm: Name of the algorithm.
        size_bytes: Length of a hash; 0 stands for the algorithm's own.
        none_hash: Parent of a first block; empty until the pool draws one.
        key_form: How extra keys enter the hash.
    """

    algorithm: str = "sha256_cbor"
    size_bytes: int = 0
    none_hash: bytes = field(default=b"", repr=False)
    key_form: KeyForm = KeyForm.TAGGED

    def check(self) -> None:
        """Raises InvalidArgumentError if a number is out of range."""
        _check_text("config.hash_scheme.algorithm", self.algorithm, 1, 64)
        check_range("config.hash_scheme.size_bytes", self.hash_size_bytes, 8, 64)
        check_range("config.hash_scheme.none_hash", len(self.none_hash), 0, 64)
        known = _HASH_SIZES_BYTES.get(self.algorithm, self.hash_size_bytes)
        if known != self.hash_size_bytes:
            raise InvalidArgumentError("config.hash_scheme.size_bytes", f"{self.algorithm} gives {known} bytes")

    @property
    def hash_size_bytes(self) -> int:
        """Length of a hash in bytes."""
        return self.size_bytes or _HASH_SIZES_BYTES.get(self.algorithm, 32)

    def salted(self, salt: bytes) -> "HashScheme":
        """The scheme of those who share a salt: with a none_hash that others cannot work out.

        It is HMAC-SHA256 of the salt under the pool's none_hash, cut to the length of a hash. An empty salt changes
        nothing.
        """
        if not salt:
            return self
        return replace(self, none_hash=hmac.digest(self.none_hash, salt, "sha256")[: self.hash_size_bytes])


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Everything that decides what a pool answers.

    Attributes:
        name: The pool's name.
        num_blocks: Blocks, the null block included.
        max_model_len: Most tokens a request may have.
        groups: The layers, by group.
        reuse_order: The order in which freed blocks are used again.
        enable_caching: Whether full blocks can be found again by hash.
        use_eagle: Whether the last block of a hit is computed again, for EAGLE's drafts.
        dcp_world_size: Ranks over which decode context parallelism spreads a request's tokens.
        enable_events: Whether block events are made.
        hash_scheme: How blocks are hashed.
        max_in_flight_tokens: Most tokens of a request in steps that were not yet executed; 0 for max_model_len.
        retention_tokens: Of sliding windows, only what a hit at a multiple of so many tokens needs is cached, and what
            requests that share a prefix need; 0 for the latter alone, None to cache all. See `retention`.
    """

    name: PoolName
    num_blocks: int
    max_model_len: int
    groups: tuple[KVCacheGroup, ...]
    reuse_order: ReuseOrder = ReuseOrder.UNCACHED_FIRST
    enable_caching: bool = True
    use_eagle: bool = False
    dcp_world_size: int = 1
    enable_events: bool = False
    hash_scheme: HashScheme = HashScheme()
    max_in_flight_tokens: int = 0
    retention_tokens: int | None = None

    def check(self) -> None:
        """Checks every number.

        Raises:
            InvalidArgumentError: One is out of range; names the field.
        """
        check_pool_name("config.name", self.name)
        check_range("config.num_blocks", self.num_blocks, 2, MAX_BLOCKS)
        check_range("config.max_model_len", self.max_model_len, 1, MAX_TOKENS)
        check_range("config.dcp_world_size", self.dcp_world_size, 1, 1024)
        check_range("config.max_in_flight_tokens", self.max_in_flight_tokens, 0, MAX_TOKENS)
        self.hash_scheme.check()
        self._check_groups()
        self._check_retention()

    def _check_groups(self) -> None:
        check_range("config.groups", len(self.groups), 1, MAX_GROUPS)
        self._check_layers()
        spans = self.spans_tokens
        for i, group in enumerate(self.groups):
            spec = allocation_spec(group.spec)
            if type(spec) not in SPEC_KINDS.values():
                raise InvalidArgumentError(f"config.groups[{i}].spec", f"{type(spec).__name__} is no kind of attention")
            if isinstance(spec, EncoderOnlyAttentionSpec):
                raise InvalidArgumentError(f"config.groups[{i}].spec", "encoder-only layers keep nothing: no group")
            if isinstance(spec, CrossAttentionSpec) and self.enable_caching:
                raise InvalidArgumentError(
                    "config.disable_caching",
                    f"must be set: group {i} is cross attention, and hashes do not cover what the encoder was given",
                )
            if num_sink_tokens(spec) % spans[i]:
                raise InvalidArgumentError(
                    f"config.groups[{i}].spec.sink_len", "no multiple of block_size x dcp_world_size"
                )
        sinks = sum(self.num_sink_blocks)
        if sinks > self.num_blocks - 2:
            raise InvalidArgumentError("config.num_blocks", f"{self.num_blocks} leaves none beside {sinks} sink blocks")
        num_sizes = len(set(spans))
        if self.enable_caching and num_sizes > MAX_BLOCK_SPANS:
            raise InvalidArgumentError(
                "config.groups", f"blocks of {num_sizes} different sizes, at most {MAX_BLOCK_SPANS} are served"
            )
        if self.enable_caching and common_multiple_tokens(spans, self.max_model_len) > MAX_TOKENS:
            raise InvalidArgumentError(
                "config.groups",
                f"block sizes have no common multiple in [1, {MAX_TOKENS}]: no prefix could be found in all groups",
            )

    def _check_retention(self) -> None:
        where, tokens = "config.retention_tokens", self.retention_tokens
        if tokens is None:
            return
        check_range(where, tokens, 0, MAX_TOKENS)
        specs = [allocation_spec(group.spec) for group in self.groups]
        if self.enable_caching and any(isinstance(spec, MambaSpec) for spec in specs):
            raise InvalidArgumentError(where, "must be absent: states of Mamba groups are all cached")
        if tokens and not any(isinstance(spec, SlidingWindowSpec) for spec in specs):
            raise InvalidArgumentError(where, f"{tokens} without a sliding window, the only kind it applies to")
        if tokens % self.hit_alignment:
            raise InvalidArgumentError(where, f"{tokens} is no multiple of {self.hit_alignment}, as hits are")

    def _check_layers(self) -> None:
        names: set[str] = set()
        for i, group in enumerate(self.groups):
            where = f"config.groups[{i}].layer_names"
            layers = group.spec.layers if isinstance(group.spec, UniformTypeKVCacheSpecs) else ()
            if layers and group.layer_names and {name for name, _ in layers} != set(group.layer_names):
                raise InvalidArgumentError(where, "differ from the layers of the group's spec")
            for j, name in enumerate(group.layer_names or [name for name, _ in layers]):
                _check_text(f"{where}[{j}]", name, 1, 256)
                if name in names:
                    raise InvalidArgumentError(f"{where}[{j}]", f"{name!r} stands twice")
                names.add(name)
            check_range(where, len(names), 0, MAX_LAYERS)

    @property
    def spans_tokens(self) -> tuple[int, ...]:
        """Tokens of a request that a block covers, over all ranks, group by group."""
        return tuple(block_span_tokens(group.spec, self.dcp_world_size) for group in self.groups)

    def span_tokens(self, group_id: GroupId) -> int:
        """Tokens of a request that a block of the group covers, over all ranks."""
        return self.spans_tokens[group_id]

    @property
    def num_sink_blocks(self) -> tuple[int, ...]:
        """Blocks set aside for sinks, group by group."""
        return tuple(
            num_sink_tokens(group.spec) // span for group, span in zip(self.groups, self.spans_tokens, strict=True)
        )

    @property
    def hash_block_size(self) -> int:
        """Tokens that one block hash covers. A block that covers more is found by its hashes, joined."""
        return math.gcd(*self.spans_tokens)

    @property
    def hit_alignment(self) -> int:
        """Every hit is a multiple of so many tokens: whole blocks in every group."""
        return math.lcm(*self.spans_tokens)

    @property
    def makes_events(self) -> bool:
        """Whether block events are made: without caching there is nothing to tell."""
        return self.enable_events and self.enable_caching

    def difference(self, other: "PoolConfig") -> str:
        """Names the first field in which a second declaration of this pool differs; empty if none does.

        A second declaration that leaves none_hash open agrees with any.
        """
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            if isinstance(mine, HashScheme):
                for part in fields(mine):
                    left, right = getattr(mine, part.name), getattr(theirs, part.name)
                    if part.name == "size_bytes":
                        left, right = mine.hash_size_bytes, theirs.hash_size_bytes
                    if part.name == "none_hash":  # a secret: how long this takes must not tell where a guess differs
                        left, right = hmac.compare_digest(left, right or left), True
                    if left != right:
                        return f"hash_scheme.{part.name}"
            elif mine != theirs:
                return entry.name
        return ""


def check_pool_name(field: str, name: str) -> None:
    """Raises InvalidArgumentError if a pool cannot have this name."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(field, "needs 1 to 128 letters, digits, '.', '_', '-' or '/'")


def _check_text(where: str, text: str, low: int, high: int) -> None:
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if not low <= size_bytes <= high:
        raise InvalidArgumentError(where, f"{size_bytes} bytes long, not in [{low}, {high}]")
