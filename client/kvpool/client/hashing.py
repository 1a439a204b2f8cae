"""Block hashes: what a full block is found by, the same in every process that agrees on the scheme.

1. The hash of a block is the algorithm over the canonical CBOR of the array [parent, token ids, extra keys]: parent is
   the hash of the block before, none_hash for the first; extra keys are an array, null if there are none.
2. Extra keys, in this order: the LoRA; each multimodal item whose tokens overlap the block; in the first block only,
   the cache salt. Chaining through the parent carries them on to all later blocks.
3. Tagged keys say where they come from, so that a salt that spells a LoRA's name stays a salt. Plain keys are the bare
   strings, with the way of vLLM 0.14.1 to find them: for blocks that become full after the prompt was hashed only the
   last multimodal item is looked at, and the first of them counts it even if the item ends just before the block.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import cbor2
import xxhash

from kvpool.client.token_cbor import encoded_blocks
from kvpool.core.ids import BlockHash
from kvpool.core.specs.pool_config import HashScheme, KeyForm

HashFunction = Callable[[bytes], bytes]
"""From the CBOR of a block to its hash."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


_FUNCTIONS: Final[dict[str, HashFunction]] = {"sha256_cbor": _sha256, "xxhash_cbor": _xxh3_128}


def register_hash(algorithm: str, function: HashFunction) -> None:
    """Makes an algorithm of one's own known by name; every session of a pool that uses it must do so.

    Args:
        algorithm: The name, as in the pool's hash scheme.
        function: Gets the canonical CBOR of a block; returns as many bytes as the scheme says.

    Raises:
        ValueError: The name is taken by another function.
    """
    if _FUNCTIONS.setdefault(algorithm, function) is not function:
        raise ValueError(f"hash algorithm {algorithm!r} is registered already")


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image, audio or video whose embeddings stand for a range of a prompt's tokens.

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
    """What, besides the tokens, decides a request's keys and values.

    Attributes:
        lora_name: Its LoRA; None if there is none.
        lora_path: Where the LoRA was loaded from; part of tagged keys.
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
            form: How keys are written.
            resumed_at: First token that is hashed now, if blocks before it were hashed earlier; matters to rule 3.

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
    """Hashes the blocks of a pool's requests."""

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
        self._function = _FUNCTIONS[scheme.algorithm]
        self._form = scheme.key_form
        self._none_hash = scheme.none_hash
        self._array = cbor2.dumps([0] * block_size)[:-block_size]  # what comes before so many items
        self._heads: dict[int, bytes] = {}

    def hash_block(
        self, parent: BlockHash | None, token_ids: Sequence[int], extra_keys: list[object] | None
    ) -> BlockHash:
        """Hashes one block; `parent` is None for a request's first."""
        data = cbor2.dumps([parent or self._none_hash, token_ids, extra_keys], canonical=True)
        return BlockHash(self._function(data))

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int], keys: ExtraKeys = NO_EXTRA_KEYS) -> None:
        """Appends to `hashes` those of the full blocks of `token_ids` that it lacks. O(new tokens)."""
        size, function = self.block_size, self._function
        first = len(hashes) * size
        new = token_ids[first : len(token_ids) // size * size]
        without = keys is NO_EXTRA_KEYS or keys == NO_EXTRA_KEYS
        parent: bytes = hashes[-1] if hashes else self._none_hash
        if without and len(new) == size:  # a decode that fills a block
            hashes.append(BlockHash(function(cbor2.dumps([parent, new, None]))))
            return
        extra = _NULL
        for i, block in enumerate(encoded_blocks(new, size)):
            if not without:
                start = first + i * size
                found = keys.of_block(start, start + size, self._form, resumed_at=first)
                extra = cbor2.dumps(found, canonical=True)
            parent = function(self._joined(parent, block, extra))
            hashes.append(BlockHash(parent))

    def extend_each(self, rows: Sequence[tuple[list[BlockHash], Sequence[int]]]) -> None:
        """As `extend` for the hashes and token ids of many requests without extra keys, of one new block each."""
        size, function = self.block_size, self._function
        new: list[int] = []
        for hashes, token_ids in rows:
            first = len(hashes) * size
            new += token_ids[first : first + size]
        for (hashes, _), block in zip(rows, encoded_blocks(new, size), strict=True):
            parent = hashes[-1] if hashes else self._none_hash
            hashes.append(BlockHash(function(self._joined(parent, block, _NULL))))

    def _joined(self, parent: bytes, block: bytes, extra: bytes) -> bytes:
        """A block as it is hashed: an array of the parent, the array of the ids, the extra keys."""
        head = self._heads.get(len(parent)) or self._head(len(parent))
        return b"".join((head, parent, self._array, block, extra))

    def _head(self, parent_bytes: int) -> bytes:
        """What comes before a parent of so many bytes: an array of three, a string of bytes."""
        head = cbor2.dumps([b"0" * parent_bytes, 0, 0])[: -parent_bytes - 2]
        self._heads[parent_bytes] = head
        return head
