"""Tests of journal/copy_on_write.py; they cite its rules."""

import random
from itertools import chain

import pytest

from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, RequestId, RequestNumber, SessionNumber
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.server.journal import copy_on_write
from kvpool.server.journal.copy_on_write import CopyOnWriteColumn, FrozenRequests
from support.core import config
from support.journal import Traffic
from support.state import DrivenState


class Owner:
    def __init__(self, column: list[int]) -> None:
        self.column = column


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_on_write, "SLICE_BLOCKS", 7)


@pytest.mark.parametrize("seed", range(20))
def test_rule_1_slices_show_the_column_before_later_changes(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload
    column = [rng.randrange(100) for _ in range(rng.randrange(60))]
    owner, before, expected = Owner(column), column.copy(), column.copy()
    written: list[int] = []
    for piece in chain([[]], CopyOnWriteColumn(owner, "column").slices()):
        written += piece
        for _ in range(rng.randrange(90) if column else 0):
            at, value = rng.randrange(len(column)), rng.randrange(100)
            owner.column[at] = expected[at] = value
        assert list(owner.column) == expected
        assert len(owner.column) == len(before)
    assert written == before
    assert owner.column is column


def test_rule_4_a_column_is_restored_if_it_is_not_written_to_its_end() -> None:
    column = list(range(20))
    owner = Owner(column)
    guard = CopyOnWriteColumn(owner, "column")
    next(guard.slices())
    owner.column[9] = 0
    guard.give_back()
    guard.give_back()
    assert owner.column is column
    assert column[9] == 0


def test_a_replaced_column_stays_and_the_old_one_is_written() -> None:
    owner = Owner(list(range(20)))
    pieces = CopyOnWriteColumn(owner, "column").slices()
    written = next(pieces)
    owner.column = new = [0] * 20
    assert written + [value for piece in pieces for value in piece] == list(range(20))
    assert owner.column is new


def test_the_core_changes_single_items_or_replaces_columns() -> None:
    allocator = DrivenState()
    traffic = Traffic(allocator, config(30, enable_events=True), seed=4)
    for _ in range(50):
        traffic.change()
        blocks = allocator.pool("m").blocks
        owners = [blocks, blocks.free_list, blocks.prefix_map, blocks.contents]
        columns = [
            CopyOnWriteColumn(owner, name)
            for owner in owners
            for name in ("_column", "_block_hashes", "_session_numbers", "_group_ids", "_contents")
            if hasattr(owner, name)
        ]
        assert len(columns) == 5
        traffic.change()
        for column in columns:
            column.give_back()


def test_rule_3_requests_are_written_as_of_the_snapshot() -> None:
    table, skipping = (
        BlockTable([BlockId(1), BlockId(2)], 1, 0),
        BlockTable([NULL_BLOCK, BlockId(3), BlockId(4)], 2, 1),
    )
    request = Request(RequestId("r"), RequestNumber(1), SessionNumber(1), (table, skipping), num_tokens=9)
    request.hashes, request.token_ids, request.joined_hashes = [BlockHash(b"a")] * 2, [1, 2], {2: [BlockHash(b"aa")]}
    frozen = FrozenRequests()
    places = [frozen.add([request]), frozen.add([]), frozen.add([request] * 3)]
    assert places == [(0, 1), (1, 1), (1, 4)]
    request.num_tokens = 99
    request.hashes += [BlockHash(b"b")]
    request.token_ids += [3]
    request.joined_hashes[2].append(BlockHash(b"bb"))
    request.joined_hashes[4] = []
    table.block_ids.append(BlockId(5))
    skipping.block_ids[1] = NULL_BLOCK
    skipping.num_skipped = 2
    skipping.block_ids.append(BlockId(6))
    pieces = list(frozen.slices())
    assert list(map(len, pieces)) == [1, 1, 1, 1]
    for was in chain(*pieces):
        assert (was.request_id, was.num_tokens) == ("r", 9)
        assert (was.hashes, was.token_ids, was.joined_hashes) == ([b"a"] * 2, [1, 2], {2: [b"aa"]})
        held = [(each.block_ids, each.num_cached, each.num_skipped) for each in was.tables]
        assert held == [([1, 2], 1, 0), ([0, 3, 4], 2, 1)]
