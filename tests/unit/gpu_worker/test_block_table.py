"""Block tables: rows as they come and go, slots of tokens, states, and what is refused."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

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
from support.transcripts import check

CPU = torch.device("cpu")
FULL = FullAttentionSpec(4, 1, 8, "float16")
WINDOW = SlidingWindowSpec(8, 1, 8, "float16", sliding_window=10)
STATE = MambaSpec(4, ((2,),), ("float32",))
SPECS: Final[dict[str, KVCacheSpec]] = {
    "full": FULL,
    "window": WINDOW,
    "state": STATE,
    "state-with-drafts": replace(STATE, num_speculative_blocks=2),
    "cross": CrossAttentionSpec(4, 1, 8, "float16"),
    "ring": CircularBufferSpec(6, 1, 8, "float16"),
}
OPTIONS = BlockTableOptions(100, 4, 32, 64, max_num_encoder_input_tokens=10)


def tables(
    *specs: KVCacheSpec, device: torch.device = CPU, kernel_block_sizes: tuple[int, ...] = (), **changes: Any
) -> BlockTables:
    groups = [KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs)]
    return BlockTables(groups, replace(OPTIONS, **changes), device, kernel_block_sizes)


def rows(made: BlockTables, group: int = 0) -> list[list[int]]:
    """What the device has, the nulls at the end of a row apart."""
    return [list(map(int, np.trim_zeros(row, "b"))) for row in made.groups[group].device_table.cpu().numpy()]


def array(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


class TableTranscript:
    """Tables of up to 4 requests. Lists of numbers are joined by commas, those of groups by slashes; `-` is empty."""

    made: BlockTables

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def execute(self, command: str, *words: str) -> list[str]:
        """Executes a command; returns its output."""
        options = dict(word.split("=") for word in words if "=" in word)
        arguments = [word for word in words if "=" not in word]
        try:
            if command == "tables":
                sizes = tuple(map(int, filter(None, options.pop("kernel", "").split(","))))
                changes: dict[str, Any] = {key: int(value) for key, value in options.items()}
                specs = (SPECS[name] for name in arguments)
                self.made = tables(*specs, device=self._device, kernel_block_sizes=sizes, **changes)
                return []
            return self._change(command, arguments, int(options.get("padded", 0)))
        except InvalidArgumentError as error:
            return [f"refused: {error}"]

    def _change(self, command: str, words: list[str], num_padded: int) -> list[str]:
        lists = [[[int(each) for each in ids.split(",") if ids != "-"] for ids in word.split("/")] for word in words]
        first = lists[0][0] if lists else []
        match command:
            case "add":
                self.made.add_row(first[0], lists[1])
            case "append":
                self.made.append_row(first[0], lists[1])
            case "swap" | "move":
                getattr(self.made, f"{command}_row{'s' if command == 'swap' else ''}")(first[0], lists[1][0][0])
            case "clear":
                self.made.clear_row(first[0])
            case "slots":
                return self._shown(self.made.compute_slot_mapping(array(*first), array(*lists[1][0]), num_padded))
            case "encoder":
                count = lists[1][0][0]
                return self._shown(self.made.compute_encoder_slot_mapping(np.full(count, first[0]), np.arange(count)))
            case "states":
                groups = self.made.compute_state_indices(array(*first), array(*lists[1][0]))
                return [line for states in groups if states for line in _states(states)]
            case _:
                if first:
                    self.made.commit(first[0])
                return [f"group {group}: {rows(self.made, group)}" for group in range(len(self.made.groups))]
        return []

    def _shown(self, mapping: Any) -> list[str]:
        assert {(slots.dtype, slots.device) for slots in mapping} == {(torch.int64, self._device)}
        return [f"group {group}: {slots.tolist()}" for group, slots in enumerate(mapping)]


def _states(states: Any) -> list[str]:
    assert states.read_block_ids.dtype is torch.int32
    return [f"{name}: {getattr(states, name).tolist()}" for name in STATE_FIELDS]


STATE_FIELDS: Final = (
    "read_block_ids",
    "written_block_ids",
    "has_initial_state",
    "block_idx_last_computed_token",
    "block_idx_first_scheduled_token",
    "block_idx_last_scheduled_token",
    "draft_block_ids",
)


@on_each_device
def test_tables_do_what_the_transcript_shows(device: torch.device) -> None:
    check(Path(__file__).with_name("block_tables") / "tables.txt", TableTranscript(device).execute)


def test_the_table_of_a_device_has_its_type_and_size() -> None:
    (table,) = (group.device_table for group in tables(FULL).groups)
    assert (table.dtype, table.shape) == (torch.int32, (4, 8))
    assert tables(SPECS["ring"]).groups[0].device_table.shape == (4, 1)


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
        mapping = made.compute_slot_mapping(np.zeros(num_tokens, int), np.arange(num_tokens))
        found = mapping[0].tolist()
        owners.append([position for position, slot in enumerate(found) if slot != PAD_SLOT_ID])
        assert owners[-1] == list(range(rank, num_tokens, world_size))
        assert [slot for slot in found if slot != PAD_SLOT_ID] == [28, 29, 30, 31, 12, 13, 14, 15]
    assert sorted(position for owned in owners for position in owned) == list(range(num_tokens))
