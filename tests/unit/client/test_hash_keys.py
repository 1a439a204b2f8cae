"""Rules 2 and 3 of hashing, block by block: the keys, their form and their order."""

from collections.abc import Sequence

import pytest

from kvpool.client.hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys, MultiModalItem
from kvpool.core.ids import BlockHash
from kvpool.core.specs.pool_config import HashScheme, KeyForm

SIZE = 4
PROMPT = list(range(14))  # three full blocks and two tokens
FORMS = list(KeyForm)


def hasher(form: KeyForm = KeyForm.TAGGED, algorithm: str = "sha256_cbor", none_hash: bytes = b"n" * 32) -> BlockHasher:
    return BlockHasher(HashScheme(algorithm, none_hash=none_hash, key_form=form), SIZE)


def hashes(
    keys: ExtraKeys = NO_EXTRA_KEYS,
    form: KeyForm = KeyForm.TAGGED,
    tokens: Sequence[int] = PROMPT,
    steps: Sequence[int] = (),
) -> list[BlockHash]:
    """Hashes `tokens` in several steps: first up to each of `steps`, then all."""
    answer: list[BlockHash] = []
    for end in (*steps, len(tokens)):
        hasher(form).extend(answer, tokens[:end], keys)
    return answer


def item(offset: int, length: int = 2, identifier: str = "cat") -> ExtraKeys:
    return ExtraKeys(mm_items=[MultiModalItem(identifier, offset, length)])


def test_blocks_hashed_one_by_one_equal_those_hashed_together() -> None:
    assert hashes(steps=(SIZE, 2 * SIZE, 3 * SIZE)) == hashes()


def test_pools_with_another_none_hash_share_nothing() -> None:
    answer: list[BlockHash] = []
    hasher(none_hash=b"m" * 32).extend(answer, PROMPT)
    assert set(answer).isdisjoint(hashes())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ExtraKeys(cache_salt="tenant 1"), ExtraKeys(cache_salt="tenant 2")),
        (ExtraKeys(cache_salt="tenant 1"), NO_EXTRA_KEYS),
        (ExtraKeys(cache_salt=""), NO_EXTRA_KEYS),
        (ExtraKeys(lora_name="a"), ExtraKeys(lora_name="b")),
        (item(0), item(0, identifier="dog")),
    ],
)
def test_keys_of_the_first_block_separate_all_blocks(left: ExtraKeys, right: ExtraKeys, form: KeyForm) -> None:
    assert set(hashes(left, form)).isdisjoint(hashes(right, form))
    assert hashes(left, form) == hashes(left, form)


@pytest.mark.parametrize(("form", "apart"), [(KeyForm.TAGGED, True), (KeyForm.PLAIN, False)])
def test_only_tagged_keys_separate_loras_of_one_name_by_path(form: KeyForm, *, apart: bool) -> None:
    one, other = ExtraKeys(lora_name="a", lora_path="/1"), ExtraKeys(lora_name="a", lora_path="/2")
    assert (hashes(one, form) != hashes(other, form)) is apart


@pytest.mark.parametrize(("form", "apart"), [(KeyForm.TAGGED, True), (KeyForm.PLAIN, False)])
def test_only_tagged_keys_separate_equal_images_by_place_in_a_block(form: KeyForm, *, apart: bool) -> None:
    assert (hashes(item(0), form) != hashes(item(1), form)) is apart


@pytest.mark.parametrize("form", FORMS)
def test_an_image_does_not_affect_earlier_blocks(form: KeyForm) -> None:
    without, with_image = hashes(form=form), hashes(item(4), form)
    assert without[0] == with_image[0]
    assert without[1] != with_image[1]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ((0, 4), None),
        ((4, 8), [["mm", "cat", 2]]),
        ((8, 12), [["mm", "cat", -2], ["mm", "dog", 3]]),
        ((12, 16), [["mm", "dog", -1]]),
    ],
)
def test_tagged_keys_name_each_item_that_overlaps_and_where_it_begins(
    block: tuple[int, int], expected: list[object] | None
) -> None:
    keys = ExtraKeys(mm_items=[MultiModalItem("cat", 6, 4), MultiModalItem("dog", 11, 2)])
    assert keys.of_block(*block, KeyForm.TAGGED) == expected


def test_keys_are_in_the_order_of_rule_2_with_the_salt_only_in_the_first_block() -> None:
    keys = ExtraKeys("lora", "/path", "salt", [MultiModalItem("cat", 0, 8)])
    assert keys.of_block(0, 4, KeyForm.PLAIN) == ["lora", "cat", "salt"]
    assert keys.of_block(4, 8, KeyForm.PLAIN) == ["lora", "cat"]
    assert keys.of_block(0, 4, KeyForm.TAGGED) == [["lora", "lora", "/path"], ["mm", "cat", 0], ["cache_salt", "salt"]]


@pytest.mark.parametrize("steps", [(4,), (3, 5), (8, 8), (1, 4, 9, 12), tuple(range(14))])
def test_tagged_hashes_do_not_depend_on_how_a_request_grew(steps: tuple[int, ...]) -> None:
    items = [MultiModalItem("cat", 1, 3), MultiModalItem("dog", 6, 2), MultiModalItem("owl", 11, 3)]
    keys = ExtraKeys("lora", "/path", "salt", items)
    assert hashes(keys, steps=steps) == hashes(keys)


def test_plain_keys_of_later_blocks_contain_only_the_last_item() -> None:
    """Rule 3, with which a client of vLLM 0.14.1 finds its blocks."""
    cat, dog = MultiModalItem("cat", 4, 4), MultiModalItem("dog", 12, 2)
    both, last = ExtraKeys(mm_items=[cat, dog]), ExtraKeys(mm_items=[dog])
    assert both.of_block(4, 8, KeyForm.PLAIN) == ["cat"]
    assert both.of_block(4, 8, KeyForm.PLAIN, resumed_at=4) is None
    assert hashes(both, KeyForm.PLAIN, steps=[4]) == hashes(last, KeyForm.PLAIN)
