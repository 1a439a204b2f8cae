"""Hashes of full blocks, by which they are found; equal in all processes that use the same scheme.

1. The hash of a block is the algorithm over the canonical CBOR of the array [parent, token ids, extra keys]: parent is
   the hash of the block before, none_hash for the first; extra keys are an array, null if there are none.
2. Extra keys, in this order: the LoRA; each multimodal item whose tokens overlap the block; in the first block only,
   the cache salt. They affect all later blocks through the parent's hash.
3. With `HashScheme.num_lookahead_tokens`, the extra keys are an array of these, or null, and of that many tokens after
   the block. Items that overlap these tokens count, too. A block is hashed once they are known. As vLLM 0.33.
4. Tagged keys include their kind, so that a salt that equals a LoRA's name stays distinct. Plain keys are the bare
   strings, chosen as in vLLM 0.14.1: for blocks that become full after the prompt was hashed, only the last multimodal
   item counts, and it counts for the first of these blocks even if it ends just before that block.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import cbor2
import xxhash

from kvpool.client.token_cbor import encoded_blocks
from kvpool.core.ids import BlockHash
from kvpool.core.specs.pool_config import HashScheme, KeyForm

HashFunction = Callable[[bytes], bytes]
"""Computes the hash of a block from its CBOR."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_FUNCTIONS: Final[dict[str, HashFunction]] = {"sha256_cbor": _sha256, "xxhash_cbor": xxhash.xxh3_128_digest}


def register_hash(algorithm: str, function: HashFunction) -> None:
    """Registers a hash algorithm by name. Every process with a session on a pool that uses it must register it.

    Args:
        algorithm: The name, as in the pool's hash scheme.
        function: Hashes the canonical CBOR of a block, to the number of bytes that the scheme states.

    Raises:
        ValueError: The name is taken by another function.
    """
    if _FUNCTIONS.setdefault(algorithm, function) is not function:
        raise ValueError(f"hash algorithm {algorithm!r} is registered already")


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image, audio or video whose embeddings replace a range of a prompt's tokens.

    Attributes:
        identifier: Hash of its contents; equal for equal items.
        offset: First token of the range.
        length: Tokens in the range.
    """

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """The inputs, besides the tokens, that determine a request's keys and values.

    Attributes:
        lora_name: Its LoRA; None if there is none.
        lora_path: Path of the LoRA; part of tagged keys.
        cache_salt: Requests share blocks only with requests of the same salt.
        mm_items: Its multimodal items, by ascending offset.
    """

    lora_name: str | None = None
    lora_path: str = ""
    cache_salt: str | None = None
    mm_items: Sequence[MultiModalItem] = ()

    def of_block(self, start: int, end: int, form: KeyForm, *, resumed_at: int = 0) -> list[object] | None:
        """Finds the extra keys of the block of tokens [start, end).

        Args:
            start: First token.
            end: Token after the last.
            form: Form of the keys.
            resumed_at: First token that is hashed now, if earlier blocks were hashed before: see rule 4.

        Returns:
            The keys in order; None if there are none.
        """
        tagged = form is KeyForm.TAGGED
        keys: list[object] = []
        if self.lora_name is not None:
            keys.append(["lora", self.lora_name, self.lora_path] if tagged else self.lora_name)
        items = self.mm_items if tagged or not resumed_at else self.mm_items[-1:]
        for item in items:
            item_end = item.offset + item.length
            touches = not tagged and item_end == start == resumed_at > 0
            if item.offset < end and (start < item_end or touches):
                keys.append(["mm", item.identifier, item.offset - start] if tagged else item.identifier)
        if self.cache_salt is not None and start == 0:
            keys.append(["cache_salt", self.cache_salt] if tagged else self.cache_salt)
        return keys or None


NO_EXTRA_KEYS: Final = ExtraKeys()
_NULL: Final = cbor2.dumps(None)


class BlockHasher:
    """Hashes the blocks of a pool's requests.

    Attributes:
        block_size: Tokens per block.
        num_lookahead_tokens: See `HashScheme`.
    """

    def __init__(self, scheme: HashScheme, block_size: int) -> None:
        """Makes the hasher of a scheme.

        Args:
            scheme: The pool's, its none_hash drawn.
            block_size: Tokens that one hash covers.

        Raises:
            ValueError: The algorithm is unknown; `register_hash` makes it known.
        """
        if scheme.algorithm not in _FUNCTIONS:
            raise ValueError(f"hash algorithm {scheme.algorithm!r} is unknown; known: {sorted(_FUNCTIONS)}")
        self.block_size = block_size
        self.num_lookahead_tokens = scheme.num_lookahead_tokens
        self._function = _FUNCTIONS[scheme.algorithm]
        self._form = scheme.key_form
        self._none_hash = scheme.none_hash
        self._array = cbor2.dumps([0] * block_size)[:-block_size]  # the head of an array of this size

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int], keys: ExtraKeys = NO_EXTRA_KEYS) -> None:
        """Appends to `hashes` the missing hashes of the full blocks of `token_ids`. O(new tokens)."""
        size, function, lookahead = self.block_size, self._function, self.num_lookahead_tokens
        first = len(hashes) * size
        new = token_ids[first : max(len(token_ids) - lookahead, 0) // size * size]
        without = not lookahead and (keys is NO_EXTRA_KEYS or keys == NO_EXTRA_KEYS)
        parent: bytes = hashes[-1] if hashes else self._none_hash
        if without and len(new) == size:  # a decode that fills a block
            hashes.append(BlockHash(function(cbor2.dumps([parent, new, None]))))
            return
        extra = _NULL
        for i, block in enumerate(encoded_blocks(new, size)):
            if not without:
                start = first + i * size
                end = start + size + lookahead
                found: object = keys.of_block(start, end, self._form, resumed_at=first)
                if lookahead:
                    found = [found, *token_ids[start + size : end]]
                extra = cbor2.dumps(found, canonical=True)
            parent = function(self._joined(parent, block, extra))
            hashes.append(BlockHash(parent))

    def extend_each(self, rows: Sequence[tuple[list[BlockHash], Sequence[int]]]) -> None:
        """As `extend`, for many requests without extra keys that each have one new block, without look-ahead."""
        size, function = self.block_size, self._function
        new: list[int] = []
        for hashes, token_ids in rows:
            first = len(hashes) * size
            new += token_ids[first : first + size]
        for (hashes, _), block in zip(rows, encoded_blocks(new, size), strict=True):
            parent = hashes[-1] if hashes else self._none_hash
            hashes.append(BlockHash(function(self._joined(parent, block, _NULL))))

    def _joined(self, parent: bytes, block: bytes, extra: bytes) -> bytes:
        """Encodes a block for hashing: an array of the parent, the array of the ids, and the extra keys."""
        return b"".join((_head(len(parent)), parent, self._array, block, extra))


@cache
def _head(parent_bytes: int) -> bytes:
    """Encodes the bytes before a parent of this length: the heads of an array of three and of a byte string."""
    return cbor2.dumps([b"0" * parent_bytes, 0, 0])[: -parent_bytes - 2]
