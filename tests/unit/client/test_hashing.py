"""Hashes are equal in all processes that use the same scheme, and differ where contents differ."""

import hashlib

import cbor2
import pytest

from kvpool.client import BlockHasher, ExtraKeys, HashScheme, KeyForm, MultiModalItem, register_hash
from kvpool.core.ids import BlockHash

TOKENS = list(range(20))


def hashes(
    keys: ExtraKeys | None = None, form: KeyForm = KeyForm.TAGGED, pieces: tuple[int, ...] = (20,)
) -> list[BlockHash]:
    hasher = BlockHasher(HashScheme(none_hash=b"n" * 32, key_form=form), 4)
    found: list[BlockHash] = []
    for end in pieces:
        hasher.extend(found, TOKENS[:end], keys or ExtraKeys())
    return found


def test_one_hash_for_each_full_block() -> None:
    assert [len(h) for h in hashes(pieces=(19,))] == [32] * 4


def test_a_hash_covers_all_tokens_before_it() -> None:
    hasher = BlockHasher(HashScheme(none_hash=b"n" * 32), 4)
    other: list[BlockHash] = []
    hasher.extend(other, [99, *TOKENS[1:]])
    assert not set(other) & set(hashes())


def test_a_salt_that_spells_a_loras_name_stays_a_salt_where_keys_are_tagged() -> None:
    salted, adapted = ExtraKeys(cache_salt="x"), ExtraKeys(lora_name="x")
    assert hashes(salted)[0] != hashes(adapted)[0]
    assert hashes(salted, KeyForm.PLAIN)[0] == hashes(adapted, KeyForm.PLAIN)[0]


def test_plain_keys_count_an_item_that_ends_where_hashing_resumes() -> None:
    """Rule 3: plain keys follow vLLM 0.14.1."""
    keys = ExtraKeys(mm_items=[MultiModalItem("a", 5, 3)])
    assert hashes(keys, KeyForm.PLAIN, (8, 12))[2] != hashes(keys, KeyForm.PLAIN)[2]


def test_custom_algorithms() -> None:
    def shortened(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()[:8]

    register_hash("test-short", shortened)
    register_hash("test-short", shortened)
    found: list[BlockHash] = []
    BlockHasher(HashScheme("test-short", 8, b"n"), 4).extend(found, TOKENS)
    assert [len(h) for h in found] == [8] * 5
    with pytest.raises(ValueError, match="registered already"):
        register_hash("test-short", lambda data: data)
    with pytest.raises(ValueError, match="unknown"):
        BlockHasher(HashScheme("nobody's"), 4)


def test_a_hash_can_cover_tokens_after_its_block() -> None:
    """Its extra keys are then an array of those of the block and of these tokens, and of the tokens."""
    hasher = BlockHasher(HashScheme(none_hash=b"n" * 32, num_lookahead_tokens=2), 4)
    hashes: list[BlockHash] = []
    hasher.extend(hashes, list(range(9)))
    assert len(hashes) == 1
    hasher.extend(hashes, list(range(10)), ExtraKeys(mm_items=[MultiModalItem("i", 9, 1)]))
    first = hashlib.sha256(cbor2.dumps([b"n" * 32, [0, 1, 2, 3], [None, 4, 5]], canonical=True)).digest()
    keys = [[["mm", "i", 5]], 8, 9]
    assert hashes == [first, hashlib.sha256(cbor2.dumps([first, [4, 5, 6, 7], keys], canonical=True)).digest()]


def test_hashes_that_look_ahead_are_none_for_few_tokens() -> None:
    hasher = BlockHasher(HashScheme(none_hash=b"n" * 32, num_lookahead_tokens=9), 4)
    hashes: list[BlockHash] = []
    for num_tokens in range(13):
        hasher.extend(hashes, list(range(num_tokens)))
        assert not hashes
    hasher.extend(hashes, list(range(13)))
    assert len(hashes) == 1
