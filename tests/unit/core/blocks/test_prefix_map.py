"""Rules 1 to 4 of prefix_map."""

import pytest

from kvpool.core.blocks.prefix_map import MAX_EXAMINED, PrefixMap
from kvpool.core.ids import BlockHash, BlockId, GroupId, MapId, SessionNumber, StepNumber

GROUP, OTHER_GROUP = MapId(0), MapId(1)
SESSION_NUMBER, READER = SessionNumber(1), SessionNumber(2)


@pytest.fixture
def prefix_map() -> PrefixMap:
    return PrefixMap(num_columns=10, num_groups=2, num_blocks=10)


def hashes(names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


def insert(
    prefix_map: PrefixMap,
    names: str,
    *ids: int,
    session_number: SessionNumber = SESSION_NUMBER,
    sequence: int = 1,
    group: MapId = GROUP,
) -> None:
    prefix_map.insert(group, [BlockId(i) for i in ids], hashes(names), session_number, StepNumber(sequence))


def find(prefix_map: PrefixMap, names: str, reader: SessionNumber, group: MapId) -> list[BlockId]:
    return prefix_map.find(group, hashes(names), 0, len(names), reader)


def test_finds_the_longest_prefix_that_is_cached(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "abd", 3, 1, 2)
    assert find(prefix_map, "abcd", SESSION_NUMBER, GROUP) == [3, 1]
    assert find(prefix_map, "xab", SESSION_NUMBER, GROUP) == []


def test_groups_do_not_share_hashes(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "a", 1)
    insert(prefix_map, "a", 2, group=OTHER_GROUP)
    assert find(prefix_map, "a", SESSION_NUMBER, GROUP) == [1]
    assert find(prefix_map, "a", SESSION_NUMBER, OTHER_GROUP) == [2]
    assert [prefix_map.group_id(BlockId(i)) for i in (1, 2)] == [GroupId(0), GroupId(1)]


def test_the_first_cached_copy_is_found_until_it_is_removed(prefix_map: PrefixMap) -> None:
    for block_id in (5, 2, 7):
        insert(prefix_map, "a", block_id)
    assert len(prefix_map) == 3
    found = []
    while block_ids := find(prefix_map, "a", SESSION_NUMBER, GROUP):
        found += block_ids
        prefix_map.remove(block_ids[0])
    assert found == [5, 2, 7]
    assert len(prefix_map) == 0


def test_one_batch_can_contain_a_hash_twice(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "aa", 1, 2)
    assert [block_id for _, _, block_id in prefix_map.entries()] == [1, 2]


def test_a_block_is_visible_only_to_its_session_until_published(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "ab", 1, 2)
    assert find(prefix_map, "ab", SESSION_NUMBER, GROUP) == [1, 2]
    assert find(prefix_map, "ab", READER, GROUP) == []
    prefix_map.pending.publish(SESSION_NUMBER, StepNumber(1))
    assert find(prefix_map, "ab", READER, GROUP) == [1, 2]


def test_publishing_covers_only_executed_steps(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "a", 1, sequence=3)
    insert(prefix_map, "b", 2, sequence=4)
    insert(prefix_map, "c", 3, sequence=6)
    prefix_map.pending.publish(SESSION_NUMBER, StepNumber(5))
    prefix_map.pending.publish(SESSION_NUMBER, StepNumber(4))
    assert find(prefix_map, "abc", READER, GROUP) == [1, 2]
    assert prefix_map.pending.steps == {3: 6}
    assert prefix_map.pending.of(SESSION_NUMBER) == [3]


def test_publishing_covers_only_the_sessions_own_blocks(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "a", 1)
    insert(prefix_map, "b", 2, session_number=READER)
    prefix_map.pending.publish(READER, StepNumber(9))
    prefix_map.pending.publish(SessionNumber(3), StepNumber(9))
    assert prefix_map.pending.steps == {1: 1}


def test_a_visible_copy_is_found_behind_an_invisible_one(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "ab", 1, 2)
    insert(prefix_map, "ab", 3, 4, session_number=READER)
    assert find(prefix_map, "ab", READER, GROUP) == [3, 4]
    assert find(prefix_map, "ab", SESSION_NUMBER, GROUP) == [1, 2]


def test_behind_many_invisible_copies_only_the_newest_are_found(prefix_map: PrefixMap) -> None:
    prefix_map.extend_columns(4 * MAX_EXAMINED)
    for block_id in range(1, MAX_EXAMINED + 1):
        insert(prefix_map, "a", block_id)
    own = MAX_EXAMINED + 1
    insert(prefix_map, "a", own, session_number=READER)
    assert find(prefix_map, "a", READER, GROUP) == [own]
    for block_id in range(own + 1, own + MAX_EXAMINED + 1):
        insert(prefix_map, "a", block_id)
    assert find(prefix_map, "a", READER, GROUP) == []
    assert find(prefix_map, "a", SESSION_NUMBER, GROUP) == [1]


def test_a_prefix_ends_at_the_first_invisible_block(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "ac", 1, 3, sequence=1)
    insert(prefix_map, "b", 2, sequence=2)
    prefix_map.pending.publish(SESSION_NUMBER, StepNumber(1))
    assert find(prefix_map, "abc", READER, GROUP) == [1]


def test_removing_returns_the_hash_once(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "a", 1)
    assert prefix_map.remove(BlockId(1)) == [b"a"]
    assert prefix_map.block_hash(BlockId(1)) is None
    with pytest.raises(KeyError):
        prefix_map.remove(BlockId(1))


def test_a_block_cached_again_after_pending_has_a_new_state(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "a", 1, sequence=1)
    prefix_map.remove(BlockId(1))
    assert prefix_map.pending.of(SESSION_NUMBER) == []
    insert(prefix_map, "b", 1, session_number=READER, sequence=7)
    prefix_map.pending.publish(SESSION_NUMBER, StepNumber(9))
    assert prefix_map.pending.steps == {1: 7}
    assert find(prefix_map, "b", SESSION_NUMBER, GROUP) == []


def test_counts_the_blocks_that_a_session_filled(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "ab", 1, 2)
    insert(prefix_map, "c", 3, session_number=READER)
    assert prefix_map.num_written_by([BlockId(1), BlockId(2), BlockId(3)], SESSION_NUMBER) == 2


def test_a_cleared_map_holds_nothing_and_can_be_filled_again(prefix_map: PrefixMap) -> None:
    insert(prefix_map, "aab", 1, 2, 3)
    prefix_map.clear()
    assert (len(prefix_map), list(prefix_map.entries()), dict(prefix_map.pending.steps)) == (0, [], {})
    assert prefix_map.pending.of(SESSION_NUMBER) == []
    insert(prefix_map, "a", 2, sequence=2)
    prefix_map.pending.publish(SESSION_NUMBER, StepNumber(1))
    assert list(prefix_map.entries()) == [(GroupId(0), b"a", 2)]
    assert prefix_map.pending.steps == {2: 2}
