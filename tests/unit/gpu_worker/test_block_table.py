"""Block tables: rows as they come and go, slots of tokens, states, and what is refused."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.gpu_worker.block_table import BlockTables
from kvpool.gpu_worker.group_table import PAD_SLOT_ID, BlockTableOptions
from support.torch import on_each_device

CPU = torch.device("cpu")
FULL = FullAttentionSpec(4, 1, 8, "float16")
WINDOW = SlidingWindowSpec(8, 1, 8, "float16", sliding_window=10)
STATE = MambaSpec(4, ((2,),), ("float32",))
CROSS = CrossAttentionSpec(4, 1, 8, "float16")
OPTIONS = BlockTableOptions(100, 4, 32, 64, max_num_encoder_input_tokens=10)


def tables(
    *specs: KVCacheSpec, device: torch.device = CPU, kernel_block_sizes: tuple[int, ...] = (), **changes: Any
) -> BlockTables:
    groups = [KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs)]
    return BlockTables(groups, replace(OPTIONS, **changes), device, kernel_block_sizes)


def rows(made: BlockTables, group: int = 0) -> list[list[int]]:
    """What the device has, the nulls at the end of a row apart."""
    return [list(np.trim_zeros(row, "b")) for row in made.groups[group].device_table.cpu().numpy()]


def array(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def slots(made: BlockTables, row: int, *positions: int, group: int = 0) -> list[int]:
    mapping = made.compute_slot_mapping(np.full(len(positions), row), array(*positions))[group]
    return [int(slot) for slot in mapping.cpu()]


@on_each_device
def test_the_device_sees_rows_once_they_are_committed(device: torch.device) -> None:
    made = tables(FULL, WINDOW, device=device)
    made.add_row(0, [[5, 6], [7]])
    made.add_row(1, [[8], [0, 9]])
    made.append_row(0, [[10], np.array([11], np.int32)])
    assert rows(made) == [[], [], [], []]
    made.commit(2)
    assert rows(made) == [[5, 6, 10], [8], [], []]
    assert rows(made, 1) == [[7, 11], [0, 9], [], []]
    assert (made.groups[0].device_table.dtype, made.groups[0].device_table.shape) == (torch.int32, (4, 8))
    assert made.groups[0].device_table.device == device


@on_each_device
def test_only_rows_in_use_are_copied(device: torch.device) -> None:
    made = tables(FULL, device=device)
    for row in range(4):
        made.add_row(row, [[row + 1]])
    made.commit(2)
    assert rows(made) == [[1], [2], [], []]
    made.commit(4)
    assert rows(made) == [[1], [2], [3], [4]]


@on_each_device
def test_rows_are_swapped_moved_and_cleared(device: torch.device) -> None:
    made = tables(FULL, device=device)
    made.add_row(0, [[1, 2, 3]])
    made.add_row(1, [[4]])
    made.swap_rows(0, 1)
    made.commit(4)
    assert rows(made) == [[4], [1, 2, 3], [], []]
    made.move_row(1, 3)
    made.move_row(3, 3)
    made.add_row(0, [[9]])
    made.commit(4)
    assert rows(made) == [[9], [], [], [1, 2, 3]]
    made.clear_row(3)
    made.append_row(3, [[7]])
    made.commit(4)
    assert rows(made) == [[9], [], [], [7]]


@on_each_device
@pytest.mark.parametrize("seed", range(5))
def test_random_changes_end_as_those_of_plain_lists(device: torch.device, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret
    made = tables(FULL, WINDOW, device=device)
    model: list[list[list[int]]] = [[[], []] for _ in range(4)]
    for _ in range(200):
        first, second = rng.randrange(4), rng.randrange(4)
        ids = [[rng.randrange(1, 100) for _ in range(rng.randrange(3))] for _ in range(2)]
        match rng.randrange(6):
            case 0:
                made.add_row(first, ids)
                model[first] = ids
            case 1 | 2 if all(
                len(have) + len(new) <= most for have, new, most in zip(model[first], ids, (8, 4), strict=True)
            ):
                made.append_row(first, ids)
                model[first] = [have + new for have, new in zip(model[first], ids, strict=True)]
            case 3:
                made.swap_rows(first, second)
                model[first], model[second] = model[second], model[first]
            case 4:
                made.move_row(first, second)
                if first != second:
                    model[second], model[first] = model[first], [[], []]
            case 5:
                made.clear_row(first)
                model[first] = [[], []]
        made.commit(rng.randrange(5))
    made.commit(4)
    for group in range(2):
        assert rows(made, group) == [row[group] for row in model]


@on_each_device
def test_slots_of_tokens(device: torch.device) -> None:
    made = tables(FULL, WINDOW, device=device)
    made.add_row(0, [[5, 6, 7], [0, 9]])
    made.add_row(2, [[8], [3]])
    mapping = made.compute_slot_mapping(array(0, 0, 2, 2), array(8, 9, 0, 3), num_padded_tokens=6)
    assert [(slot.dtype, slot.device) for slot in mapping] == [(torch.int64, device)] * 2
    assert [slot.tolist() for slot in mapping] == [[28, 29, 32, 35, -1, -1], [72, 73, 24, 27, -1, -1]]
    assert [slot.tolist() for slot in made.compute_slot_mapping(array(), array(), 3)] == [[-1, -1, -1]] * 2


@pytest.mark.parametrize(
    ("row", "position", "why"),
    [
        (0, 12, r"positions: group 0 \(layer 'layer.0', ...\): row 0 has 3 blocks and no entry in column 3"),
        (0, 3, "row 0 has the null block in column 0"),
        (1, 0, "row 1 has 0 blocks and no entry in column 0"),
        (1, 31, "row 1 has 0 blocks and no entry in column 7"),
        (1, 4000, "row 1 has 0 blocks and no entry in column 1000"),
        (1, -1, r"positions: -1 is not in \[0"),
        (4, 0, r"req_indices: 4 is not in \[0, 3\]"),
    ],
)
def test_a_token_without_a_block_is_refused(row: int, position: int, why: str) -> None:
    made = tables(FULL)
    made.add_row(1, [[1, 2, 3, 4]])
    made.clear_row(1)  # no row lists its blocks now
    made.add_row(0, [[0, 6, 7]])
    before = made.compute_slot_mapping(array(0), array(4))[0]
    with pytest.raises(InvalidArgumentError, match=why):
        slots(made, row, position)
    assert before.tolist() == [24]


def test_a_step_that_is_too_large_or_uneven_is_refused() -> None:
    made = tables(FULL)
    made.add_row(0, [[1]])
    with pytest.raises(InvalidArgumentError, match=r"65 is not in \[0, 64\]"):
        made.compute_slot_mapping(array(0), array(0), num_padded_tokens=65)
    with pytest.raises(InvalidArgumentError, match=r"positions: \(2,\) for req_indices \(1,\)"):
        made.compute_slot_mapping(array(0), array(0, 1))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kernel_block_size", [0, 2])
def test_context_parallel_ranks_hold_each_token_once(world_size: int, kernel_block_size: int) -> None:
    """Together the ranks write every token; on its rank a block holds block_size of them, in their order."""
    num_tokens = 4 * world_size * 2
    owners = []
    for rank in range(world_size):
        made = tables(
            FULL, kernel_block_sizes=(kernel_block_size,), dcp_world_size=world_size, dcp_rank=rank, max_model_len=64
        )
        made.add_row(0, [[7, 3]])
        found = slots(made, 0, *range(num_tokens))
        owners.append([position for position, slot in enumerate(found) if slot != PAD_SLOT_ID])
        assert owners[-1] == list(range(rank, num_tokens, world_size))
        assert [slot for slot in found if slot != PAD_SLOT_ID] == [28, 29, 30, 31, 12, 13, 14, 15]
    assert sorted(position for owned in owners for position in owned) == list(range(num_tokens))


def test_a_block_is_split_into_kernel_blocks() -> None:
    made = tables(FULL, WINDOW, kernel_block_sizes=(2, 0))
    made.add_row(0, [[5], [5]])
    made.append_row(0, [[0, 6], []])
    made.commit(1)
    assert made.groups[0].device_table[0, :6].tolist() == [10, 11, 0, 1, 12, 13]
    assert rows(made, 1)[0] == [5]
    assert slots(made, 0, 0, 3) == [20, 23]  # the same elements as without
    with pytest.raises(InvalidArgumentError, match="row 0 has the null block in column 1"):
        slots(made, 0, 6)
    with pytest.raises(InvalidArgumentError, match=r"x 2 blocks are over 2147483647"):
        tables(FULL, kernel_block_sizes=(2,), num_blocks=2**30)
    with pytest.raises(InvalidArgumentError, match=r"layer 'layer\.0': a MambaSpec keeps states"):
        tables(STATE, kernel_block_sizes=(2,))


def test_refused_rows_change_nothing() -> None:
    made = tables(FULL, WINDOW)
    made.add_row(0, [[5], [6]])
    for block_ids, why in (
        ([[1], [100]], r"group 1 \(layer 'layer.1', ...\): 100 is not in \[0, 100\)"),
        ([[1], [-1]], "-1 is not in"),
        ([[1], [1] * 4], "5 blocks; a request of maximum length takes 4"),
        ([[1]], "1 lists for 2 groups"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            made.append_row(0, block_ids)
    for row in (-1, 4):
        for change in (made.clear_row, lambda row: made.add_row(row, [[1], [1]]), lambda row: made.swap_rows(0, row)):
            with pytest.raises(InvalidArgumentError, match=f"row: {row} is not in"):
                change(row)
    made.commit(4)
    assert (rows(made), rows(made, 1)) == ([[5], [], [], []], [[6], [], [], []])


@on_each_device
def test_encoder_tokens_have_their_own_slots(device: torch.device) -> None:
    made = tables(FULL, CROSS, STATE, device=device)
    made.add_row(1, [[5], [8, 9, 2], [7]])
    mapping = made.compute_encoder_slot_mapping(np.full(10, 1), np.arange(10))
    assert [slot.tolist() for slot in mapping] == [[], [32, 33, 34, 35, 36, 37, 38, 39, 8, 9], []]
    assert [len(slot) for slot in made.compute_slot_mapping(array(1), array(3))] == [1, 0, 0]
    with pytest.raises(InvalidArgumentError, match="takes 3"):
        made.add_row(1, [[5], [8, 9, 2, 3], [7]])


@on_each_device
def test_states_are_read_after_the_last_computed_token(device: torch.device) -> None:
    """Row 0 begins; row 1 goes on within a block; row 2 begins a block after a hit of two; row 3 spans three."""
    made = tables(FULL, STATE, device=device)
    for row, ids in enumerate([[11], [21, 22], [0, 32, 33], [41, 42, 43, 44]]):
        made.add_row(row, [[], ids])
    none, states = made.compute_state_indices(array(0, 5, 8, 3), array(4, 1, 1, 11))
    assert none is None
    assert states is not None
    assert states.read_block_ids.tolist() == [PAD_SLOT_ID, 22, 32, 41]
    assert states.written_block_ids.tolist() == [11, 22, 33, 44]
    assert states.has_initial_state.tolist() == [False, True, True, True]
    assert states.block_idx_last_computed_token.tolist() == [0, 1, 1, 0]
    assert states.block_idx_first_scheduled_token.tolist() == [0, 1, 2, 0]
    assert states.block_idx_last_scheduled_token.tolist() == [0, 1, 2, 3]
    assert states.draft_block_ids.shape == (4, 0)
    assert (states.read_block_ids.dtype, states.read_block_ids.device) == (torch.int32, device)


def test_drafts_have_the_last_blocks_of_a_row() -> None:
    made = tables(replace(STATE, num_speculative_blocks=2))
    made.add_row(0, [[5, 6, 7]])
    made.add_row(1, [[0, 2, 8, 9]])
    (states,) = made.compute_state_indices(array(1, 7), array(3, 1))
    assert states is not None
    assert states.written_block_ids.tolist() == [5, 2]
    assert states.draft_block_ids.tolist() == [[6, 7], [8, 9]]
    with pytest.raises(InvalidArgumentError, match="row 1 has 2 blocks and no entry in column 2"):
        made.compute_state_indices(array(1, 8), array(3, 1))


@pytest.mark.parametrize(
    ("computed", "scheduled", "why"),
    [
        ([4], [1], "num_computed_tokens: .*row 0 has the null block in column 0"),
        ([8], [1], "num_scheduled_tokens: .*row 0 has 2 blocks"),
        ([5], [0], "num_scheduled_tokens: 0 is not in"),
        ([-1], [1], "num_computed_tokens: -1 is not in"),
        ([5, 5], [1], r"\(1,\) for num_computed_tokens \(2,\)"),
        ([5] * 5, [1] * 5, r"num_computed_tokens: 5 is not in \[0, 4\]"),
    ],
)
def test_a_state_without_a_block_is_refused(computed: list[int], scheduled: list[int], why: str) -> None:
    made = tables(STATE)
    made.add_row(0, [[0, 6]])
    with pytest.raises(InvalidArgumentError, match=why):
        made.compute_state_indices(array(*computed), array(*scheduled))


@pytest.mark.parametrize(
    ("field", "value"), [("dcp_rank", 1), ("dcp_world_size", 0), ("num_blocks", 0), ("max_num_reqs", 0)]
)
def test_options_are_checked(field: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field}: {value} is not in"):
        replace(OPTIONS, **{field: value})


def test_a_circular_buffer_has_one_block_and_its_slots_come_round() -> None:
    made = tables(FULL, CircularBufferSpec(6, 1, 8, "float16"))
    assert made.groups[1].device_table.shape == (4, 1)
    made.add_row(0, [[5, 6, 8, 9, 10, 11], [7]])
    assert slots(made, 0, 0, 5, 6, 17, 20, group=1) == [42, 47, 42, 47, 44]
    with pytest.raises(InvalidArgumentError, match="a request of maximum length takes 1"):
        made.append_row(0, [[], [12]])
