"""Configuration of a pool: groups, reuse order and hash scheme, as frozen values that validate their own numbers."""

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
    SPARSE_KINDS,
    SPEC_KINDS,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    UniformTypeKVCacheSpecs,
    allocation_spec,
    block_span_tokens,
    common_multiple_tokens,
    has_gaps,
    num_sink_tokens,
    rare_hits,
)

_NAME: Final = re.compile(r"[A-Za-z0-9._/-]{1,128}")
MAX_GROUPS: Final = 256
MAX_BLOCK_SPANS: Final = 8
"""Maximum number of different block sizes. A request keeps the hashes of each larger block size."""
MAX_LOOKAHEAD_TOKENS: Final = 1024
_HASH_SIZES_BYTES: Final = {"sha256_cbor": 32, "xxhash_cbor": 16}


class ReuseOrder(Enum):
    """Order in which freed blocks are reused."""

    UNCACHED_FIRST = "uncached_first"
    """Freed blocks without a hash go to the head of the free list, freed blocks with a hash to the tail.

    With caching off, all go to the head. As vLLM 0.32.
    """

    LRU = "lru"
    """All freed blocks go to the tail, in the order in which they are freed. As vLLM 0.14.1."""


class KeyForm(Enum):
    """Form in which a block's extra keys enter its hash."""

    TAGGED = "tagged"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table.

    Attributes:
        spec: The spec of the layers.
        layer_names: The names of the layers.
        has_no_draft: Whether no layer is the EAGLE draft model's, so that a hit needs no block behind it here.
    """

    spec: KVCacheSpec
    layer_names: tuple[str, ...] = ()
    has_no_draft: bool = False


@dataclass(frozen=True, slots=True)
class HashScheme:
    """Scheme by which the sessions of a pool hash their blocks.

    Attributes:
        algorithm: Name of the algorithm.
        size_bytes: Length of a hash; 0 for the algorithm's own length.
        none_hash: Parent hash of a first block; empty until the pool draws one.
        key_form: Form in which extra keys enter the hash.
        num_lookahead_tokens: Number of tokens after its block that a hash also covers. The contents of a draft model's
            last slots in a block depend on them. A block has no hash before these tokens are known.
    """

    algorithm: str = "sha256_cbor"
    size_bytes: int = 0
    none_hash: bytes = field(default=b"", repr=False)
    key_form: KeyForm = KeyForm.TAGGED
    num_lookahead_tokens: int = 0

    def check(self) -> None:
        """Raises InvalidArgumentError if a number is out of range."""
        _check_text("config.hash_scheme.algorithm", self.algorithm, 1, 64)
        check_range("config.hash_scheme.size_bytes", self.hash_size_bytes, 8, 64)
        check_range("config.hash_scheme.none_hash", len(self.none_hash), 0, 64)
        check_range("config.hash_scheme.num_lookahead_tokens", self.num_lookahead_tokens, 0, MAX_LOOKAHEAD_TOKENS)
        known = _HASH_SIZES_BYTES.get(self.algorithm, self.hash_size_bytes)
        if known != self.hash_size_bytes:
            raise InvalidArgumentError("config.hash_scheme.size_bytes", f"{self.algorithm} hashes have {known} bytes")

    @property
    def hash_size_bytes(self) -> int:
        """Length of a hash in bytes."""
        return self.size_bytes or _HASH_SIZES_BYTES.get(self.algorithm, 32)

    def salted(self, salt: bytes) -> "HashScheme":
        """Returns the scheme for sessions that share a salt, with a none_hash that other sessions cannot compute.

        The none_hash is HMAC-SHA256 of the salt under the pool's none_hash, truncated to the length of a hash. An empty
        salt changes nothing.
        """
        if not salt:
            return self
        return replace(self, none_hash=hmac.digest(self.none_hash, salt, "sha256")[: self.hash_size_bytes])


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Configuration that determines all answers of a pool.

    Attributes:
        name: Name of the pool.
        num_blocks: Number of blocks, the null block included.
        max_model_len: Maximum number of tokens per request.
        groups: The layers, by group.
        reuse_order: Order in which freed blocks are reused.
        enable_caching: Whether full blocks can be found by hash.
        use_eagle: Whether the last block of a hit is computed again, for EAGLE's drafts, in the groups that have
            layers of the draft model.
        dcp_world_size: Number of ranks over which decode context parallelism shards a request's tokens.
        enable_events: Whether block events are made.
        hash_scheme: Scheme by which blocks are hashed.
        max_in_flight_tokens: Maximum number of tokens of a request in steps that were not yet executed; 0 for
            max_model_len.
        retention_tokens: Sparse caching of sliding windows and states: only blocks that a hit at a multiple of this
            number of tokens needs are cached, and those that requests with a shared prefix need. 0 for the latter
            alone; None to cache all. See `retention`.
        keeps_block_before_boundary: Whether windows that are cached sparsely keep, with EAGLE, what a hit needs a block
            before the end of a shared prefix, too: requests that leave the prefix there resume there. As vLLM 0.33.
        num_reprefillable_tokens: Number of tokens at the end of the computed ones whose contents are not final: draft
            models with several modules compute them again. Full blocks with such tokens are not cached yet.
        allow_too_few_blocks: Whether a scheduler may declare the pool although one request of max_model_len does not
            fit. It changes no answer, and two declarations of a pool may differ in it. See `longest_request`.
        prefix_match_unit: Tokens that one hash covers; 0 for the greatest common divisor of the blocks.
        partial_hits: Whether a hit can end at each multiple of the hash block, within a block of full attention or of
            states, of which the engine then makes a copy. As vLLM with states at the ends of steps.
        shares_read_states: Whether a hit can end with a state from which a step of the same round ends a prompt. As
            vLLM 0.33.
        num_host_blocks: Number of blocks in host memory, whose ids follow those of the others; 0 for no second tier.
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
    keeps_block_before_boundary: bool = False
    num_reprefillable_tokens: int = 0
    allow_too_few_blocks: bool = False
    prefix_match_unit: int = 0
    partial_hits: bool = False
    shares_read_states: bool = False
    num_host_blocks: int = 0

    def check(self) -> None:
        """Checks every number.

        Raises:
            InvalidArgumentError: A number is out of range. The error names the field.
        """
        check_pool_name("config.name", self.name)
        check_range("config.num_blocks", self.num_blocks, 2, MAX_BLOCKS)
        check_range("config.max_model_len", self.max_model_len, 1, MAX_TOKENS)
        check_range("config.dcp_world_size", self.dcp_world_size, 1, 1024)
        check_range("config.max_in_flight_tokens", self.max_in_flight_tokens, 0, MAX_TOKENS)
        check_range("config.num_reprefillable_tokens", self.num_reprefillable_tokens, 0, MAX_LOOKAHEAD_TOKENS)
        check_range("config.num_host_blocks", self.num_host_blocks, 0, MAX_BLOCKS if self.enable_caching else 0)
        self.hash_scheme.check()
        self._check_groups()
        self._check_retention()
        self._check_units()

    def _check_groups(self) -> None:
        check_range("config.groups", len(self.groups), 1, MAX_GROUPS)
        self._check_layers()
        spans = self.spans_tokens
        for i, group in enumerate(self.groups):
            spec = allocation_spec(group.spec)
            if type(spec) not in SPEC_KINDS.values():
                raise InvalidArgumentError(
                    f"config.groups[{i}].spec", f"{type(spec).__name__} is not a kind of attention"
                )
            if isinstance(spec, EncoderOnlyAttentionSpec):
                raise InvalidArgumentError(
                    f"config.groups[{i}].spec", "encoder-only layers cache nothing and need no group"
                )
            if isinstance(spec, CrossAttentionSpec) and self.enable_caching:
                raise InvalidArgumentError(
                    "config.disable_caching",
                    f"must be set: group {i} is cross attention, and hashes do not cover the encoder's input",
                )
            if num_sink_tokens(spec) % spans[i]:
                raise InvalidArgumentError(
                    f"config.groups[{i}].spec.sink_len", "not a multiple of block_size x dcp_world_size"
                )
        sinks = sum(self.num_sink_blocks)
        if sinks > self.num_blocks - 2:
            raise InvalidArgumentError("config.num_blocks", f"{self.num_blocks} leaves none beside {sinks} sink blocks")
        if self.enable_caching and not any(allocation_spec(group.spec).is_cached for group in self.groups):
            raise InvalidArgumentError("config.disable_caching", "must be set: no group has blocks that can be hit")
        num_sizes = len(set(self._hit_spans))
        if self.enable_caching and num_sizes > MAX_BLOCK_SPANS:
            raise InvalidArgumentError(
                "config.groups", f"blocks of {num_sizes} different sizes, at most {MAX_BLOCK_SPANS} are supported"
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
        if tokens and not any(isinstance(spec, SPARSE_KINDS) for spec in specs):
            raise InvalidArgumentError(where, f"{tokens} without a sliding window or states, to which it applies")
        multiple = self.block_alignment
        if tokens % multiple:
            raise InvalidArgumentError(where, f"{tokens} is not a multiple of {multiple}, the common one of all blocks")

    def _check_units(self) -> None:
        unit = self.prefix_match_unit
        check_range("config.prefix_match_unit", unit, 0, MAX_TOKENS)
        if unit and any(span % unit for span in self._hit_spans):
            raise InvalidArgumentError("config.prefix_match_unit", f"{unit} does not divide the blocks of all groups")
        if not self.partial_hits:
            return
        where, specs = "config.partial_hits", [allocation_spec(group.spec) for group in self.groups]
        is_ahead = self.hash_scheme.num_lookahead_tokens > 0 or self.num_reprefillable_tokens > 0
        if not self.enable_caching or is_ahead or not any(has_gaps(spec) for spec in specs):
            raise InvalidArgumentError(where, "needs caching, states at the ends of steps, and no lookahead tokens")
        for i, (spec, span) in enumerate(zip(specs, self.spans_tokens, strict=True)):
            is_within = has_gaps(spec) or isinstance(spec, FullAttentionSpec)
            if spec.is_cached and not is_within and self.use_eagle:
                raise InvalidArgumentError(where, f"with EAGLE only beside full attention, group {i} has another kind")
            if spec.is_cached and not is_within and span != self.hash_block_size:
                message = f"blocks of group {i} have {span} tokens: only full attention and states at the ends of steps"
                raise InvalidArgumentError(where, f"{message} can have more than the {self.hash_block_size} of a hash")

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
                    raise InvalidArgumentError(f"{where}[{j}]", f"{name!r} occurs twice")
                names.add(name)
            check_range(where, len(names), 0, MAX_LAYERS)

    @property
    def num_ids(self) -> int:
        """Number of block ids, of both tiers."""
        return self.num_blocks + self.num_host_blocks

    @property
    def spans_tokens(self) -> tuple[int, ...]:
        """Tokens of a request that a block covers, over all ranks, group by group."""
        return tuple(block_span_tokens(group.spec, self.dcp_world_size) for group in self.groups)

    def span_tokens(self, group_id: GroupId) -> int:
        """Tokens of a request that a block of the group covers, over all ranks."""
        return self.spans_tokens[group_id]

    def num_eagle_blocks(self, group_id: GroupId) -> int:
        """Number of blocks behind a hit that must be cached too, in the group, for EAGLE's drafts."""
        group = self.groups[group_id]
        return int(self.use_eagle and not group.has_no_draft and allocation_spec(group.spec).has_token_slots)

    @property
    def _hit_spans(self) -> list[int]:
        """Tokens that a block covers in the groups that take part in hits; in all groups if none does."""
        spans = zip(self.groups, self.spans_tokens, strict=True)
        return [span for group, span in spans if allocation_spec(group.spec).is_cached] or [*self.spans_tokens]

    @property
    def num_sink_blocks(self) -> tuple[int, ...]:
        """Number of blocks reserved for sinks, group by group."""
        return tuple(
            num_sink_tokens(group.spec) // span for group, span in zip(self.groups, self.spans_tokens, strict=True)
        )

    @property
    def hash_block_size(self) -> int:
        """Tokens that one block hash covers. Larger blocks are found by the hash of their last one."""
        return self.prefix_match_unit or math.gcd(*self._hit_spans)

    def num_hashes(self, num_tokens: int) -> int:
        """Number of hashes of a request of which this many tokens are known."""
        return max(num_tokens - self.hash_scheme.num_lookahead_tokens, 0) // self.hash_block_size

    @property
    def block_alignment(self) -> int:
        """Smallest number of tokens that is whole blocks in every group that takes part in hits."""
        return math.lcm(*self._hit_spans)

    @property
    def hit_alignment(self) -> int:
        """Every hit is a multiple of this number of tokens: whole blocks in every group, unless hits are partial."""
        return self.hash_block_size if self.partial_hits else self.block_alignment

    @property
    def rare_hits(self) -> str:
        """Describes that prefixes can only be hit in large multiples; empty if not. See `kinds.rare_hits`."""
        is_whole = self.enable_caching and not self.partial_hits
        return rare_hits(self.spans_tokens, self.max_model_len) if is_whole else ""

    @property
    def makes_events(self) -> bool:
        """Whether block events are made. Without caching there are no events."""
        return self.enable_events and self.enable_caching

    def without_layers(self) -> "PoolConfig":
        """Returns the configuration with the groups of a scheduler, which need not know the layers."""
        groups = (replace(group, spec=allocation_spec(group.spec), layer_names=()) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def difference(self, other: "PoolConfig") -> str:
        """Returns the first field in which a second declaration of this pool differs; empty if none does.

        A second declaration without a none_hash matches any none_hash.
        """
        for entry in fields(self):
            if entry.name == "allow_too_few_blocks":
                continue
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            if isinstance(mine, HashScheme):
                for part in fields(mine):
                    left, right = getattr(mine, part.name), getattr(theirs, part.name)
                    if part.name == "size_bytes":
                        left, right = mine.hash_size_bytes, theirs.hash_size_bytes
                    if part.name == "none_hash":  # a secret: constant-time comparison
                        left, right = hmac.compare_digest(left, right or left), True
                    if left != right:
                        return f"hash_scheme.{part.name}"
            elif mine != theirs:
                return entry.name
        return ""


def check_pool_name(field: str, name: str) -> None:
    """Raises InvalidArgumentError if the name is not a valid pool name."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(field, "needs 1 to 128 letters, digits, '.', '_', '-' or '/'")


def _check_text(where: str, text: str, low: int, high: int) -> None:
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if not low <= size_bytes <= high:
        raise InvalidArgumentError(where, f"{size_bytes} bytes long, not in [{low}, {high}]")
