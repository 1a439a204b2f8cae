"""A step as each group's layers see it: lengths, tables, slots, and who builds what for whom."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.specs.kinds import (
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.gpu_worker.attention_backends import PagedAttentionBackend
from kvpool.gpu_worker.attention_metadata import (
    AttentionBackend,
    AttentionGroup,
    AttentionMetadataBuilder,
    BuilderContext,
    CommonAttentionMetadata,
    ScheduledStep,
    StepBuffers,
    build_attn_metadata,
    init_attn_backend,
)
from kvpool.gpu_worker.block_table import BlockTables
from kvpool.gpu_worker.group_table import BlockTableOptions
from kvpool.gpu_worker.workspace import Workspace
from support.torch import on_each_device

CPU = torch.device("cpu")
FULL = FullAttentionSpec(4, 1, 8, "float16")
WINDOW = SlidingWindowSpec(4, 1, 8, "float16", sliding_window=4)
STATE = MambaSpec(8, ((2,),), ("float32",))
CROSS = CrossAttentionSpec(4, 1, 8, "float16")
OPTIONS = BlockTableOptions(100, 4, 32, 64, max_num_encoder_input_tokens=20)
GROUPS = (KVCacheGroup(FULL, ("f0", "f1")), KVCacheGroup(WINDOW, ("w",)), KVCacheGroup(STATE, ("m",)))
STEP = ScheduledStep(np.array([5, 0]), np.array([1, 6]), num_padded_tokens=8)


class ForStates:
    """A backend whose kernels read the states of a step."""

    name, layout = "states", "mamba"

    def make_builder(self, _: BuilderContext) -> AttentionMetadataBuilder:
        return self

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


FLASH = PagedAttentionBackend()
BACKENDS: dict[str, AttentionBackend] = {"f0": FLASH, "f1": FLASH, "w": FLASH, "m": ForStates()}


@dataclass
class Counting:
    """A backend that says what it was made for and counts its builds."""

    name: str
    layout: str = "flash_attn"
    contexts: list[BuilderContext] = field(default_factory=list)
    builds: int = 0

    def make_builder(self, context: BuilderContext) -> AttentionMetadataBuilder:
        self.contexts.append(context)
        return self

    def build(self, common: CommonAttentionMetadata) -> object:
        self.builds += 1
        return (self.name, self.builds, common.num_reqs)


class Rank:
    """Tables and builders of a rank."""

    def __init__(
        self,
        groups: tuple[KVCacheGroup, ...],
        backends: dict[str, AttentionBackend],
        device: torch.device = CPU,
        shared: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        bounds = replace(OPTIONS, **options)
        self.tables = BlockTables(groups, bounds, device)
        self.buffers = StepBuffers(bounds, device)
        self.workspace = Workspace(device)
        self.attn_groups: tuple[AttentionGroup, ...] = init_attn_backend(
            groups, backends, self.tables, self.workspace, shared
        )

    def build(self, step: ScheduledStep) -> dict[str, object]:
        return build_attn_metadata(self.attn_groups, self.tables, self.buffers, step)


def mixed_rank(device: torch.device = CPU, **options: Any) -> Rank:
    rank = Rank(GROUPS, BACKENDS, device, **options)
    rank.tables.add_row(0, [[11, 12], [0, 22], [31]])
    rank.tables.add_row(1, [[13, 14], [23, 24], [32]])
    return rank


def common(metadata: object) -> CommonAttentionMetadata:
    assert isinstance(metadata, CommonAttentionMetadata)
    return metadata


@on_each_device
def test_lengths_tables_and_slots_of_a_step(device: torch.device) -> None:
    metadata = mixed_rank(device).build(STEP)
    assert metadata["f0"] is metadata["f1"]
    full, window = common(metadata["f0"]), common(metadata["w"])
    for seen in (full, window):
        assert seen.query_start_loc.tolist() == seen.query_start_loc_cpu.tolist() == [0, 1, 7]
        assert seen.seq_lens.tolist() == seen.seq_lens_cpu.tolist() == [6, 6]
        assert seen.num_computed_tokens.tolist() == seen.num_computed_tokens_cpu.tolist() == [5, 0]
        assert (seen.num_reqs, seen.num_actual_tokens, seen.max_query_len, seen.max_seq_len) == (2, 7, 6, 6)
        assert {seen.query_start_loc.dtype, seen.seq_lens.dtype, seen.block_table.dtype} == {torch.int32}
        assert {seen.query_start_loc.device, seen.block_table.device, seen.slot_mapping.device} == {device}
        assert (seen.causal, seen.block_size, seen.dcp_local_seq_lens, seen.state_indices) == (True, 4, None, None)
        assert torch.equal(seen.block_table.cpu(), torch.tensor(seen.block_table_cpu))
    assert full.block_table[:, :2].tolist() == [[11, 12], [13, 14]]
    assert window.block_table[:, :2].tolist() == [[0, 22], [23, 24]]
    assert full.slot_mapping.tolist() == [49, 52, 53, 54, 55, 56, 57, -1]
    assert window.slot_mapping.tolist() == [89, 92, 93, 94, 95, 96, 97, -1]
    states = common(metadata["m"]).state_indices
    assert states is not None
    assert states.read_block_ids.tolist() == [31, -1]
    assert states.written_block_ids.tolist() == [31, 32]


@on_each_device
def test_the_next_step_finds_its_own_lengths_at_the_same_addresses(device: torch.device) -> None:
    rank = mixed_rank(device)
    first = common(rank.build(STEP)["f0"])
    addresses = [t.data_ptr() for t in (first.query_start_loc, first.seq_lens, first.block_table, first.slot_mapping)]
    rank.tables.swap_rows(0, 1)
    second = common(rank.build(ScheduledStep(np.array([6, 6]), np.array([1, 2])))["f0"])
    assert [
        t.data_ptr() for t in (second.query_start_loc, second.seq_lens, second.block_table, second.slot_mapping)
    ] == addresses
    assert second.seq_lens.tolist() == [7, 8]
    assert second.slot_mapping.tolist() == [14 * 4 + 2, 12 * 4 + 2, 12 * 4 + 3]


@pytest.mark.parametrize(("dcp_rank", "local"), [(0, [3, 4]), (1, [3, 3])])
def test_context_parallel_ranks_are_told_their_own_lengths(dcp_rank: int, local: list[int]) -> None:
    rank = Rank(GROUPS, BACKENDS, dcp_world_size=2, dcp_rank=dcp_rank)
    rank.tables.add_row(0, [[11], [21], [31]])
    rank.tables.add_row(1, [[12], [22], [32]])
    metadata = rank.build(ScheduledStep(np.array([5, 0]), np.array([1, 7])))
    seen = common(metadata["f0"])
    assert seen.dcp_local_seq_lens is not None
    assert seen.dcp_local_seq_lens_cpu is not None
    assert seen.dcp_local_seq_lens.tolist() == seen.dcp_local_seq_lens_cpu.tolist() == local
    assert seen.seq_lens.tolist() == [6, 7]
    written = [i for i, slot in enumerate(seen.slot_mapping.tolist()) if slot >= 0]
    assert written == ([1, 3, 5, 7] if dcp_rank == 0 else [0, 2, 4, 6])


@on_each_device
def test_cross_attention_sees_the_encoders_tokens(device: torch.device) -> None:
    groups = (KVCacheGroup(FULL, ("f",)), KVCacheGroup(CROSS, ("c",)))
    rank = Rank(groups, {"f": FLASH, "c": FLASH}, device)
    rank.tables.add_row(0, [[11], [21, 22]])
    rank.tables.add_row(1, [[12], [23, 24, 25]])
    step = ScheduledStep(np.array([2, 0]), np.array([1, 1]), 0, encoder_seq_lens=np.array([6, 9]), encoder_rows=[1])
    metadata = rank.build(step)
    cross, own = common(metadata["c"]), common(metadata["f"])
    assert (cross.seq_lens.tolist(), cross.max_seq_len, cross.causal) == ([6, 9], 9, False)
    assert cross.slot_mapping.tolist() == [92, 93, 94, 95, 96, 97, 98, 99, 100]
    assert (own.seq_lens.tolist(), own.causal, own.slot_mapping.tolist()) == ([3, 1], True, [46, 48])
    decode = replace(step, num_computed_tokens=np.array([3, 1]), encoder_rows=())
    assert common(rank.build(decode)["c"]).slot_mapping.tolist() == []
    with pytest.raises(InvalidArgumentError, match="encoder_seq_lens: missing, but there are layers of cross"):
        rank.build(STEP)


def test_a_group_is_built_once_a_step_for_all_its_layers() -> None:
    counting = Counting("counting")
    rank = Rank((KVCacheGroup(FULL, ("a", "b", "c")),), dict.fromkeys("abc", counting), shared={"d": "b"})
    rank.tables.add_row(0, [[1]])
    step = ScheduledStep(np.array([0]), np.array([1]))
    assert rank.build(step) == dict.fromkeys("abcd", ("counting", 1, 1))
    assert rank.build(step) == dict.fromkeys("abcd", ("counting", 2, 1))
    (context,) = counting.contexts
    assert (context.layer_names, context.spec, context.block_size) == (("a", "b", "c"), FULL, 4)
    assert (context.max_num_reqs, context.max_blocks_per_req, context.workspace) == (4, 8, rank.workspace)


def test_layers_of_a_uniform_group_are_built_by_backend_and_spec() -> None:
    wide = replace(FULL, num_kv_heads=2)
    spec = UniformTypeKVCacheSpecs(4, (("a", FULL), ("b", wide), ("c", FULL), ("d", wide), ("e", wide)))
    one, other = Counting("one"), Counting("other", "flex")
    backends: dict[str, AttentionBackend] = {"a": one, "b": one, "c": one, "d": other, "e": other}
    rank = Rank((KVCacheGroup(spec, tuple("abcde")),), backends)
    assert [(g.layer_names, g.backend.name) for g in rank.attn_groups] == [
        (("a", "c"), "one"),
        (("b",), "one"),
        (("d", "e"), "other"),
    ]
    assert [context.spec for context in one.contexts + other.contexts] == [FULL, wide, wide]
    rank.tables.add_row(0, [[1]])
    metadata = rank.build(ScheduledStep(np.array([0]), np.array([1])))
    assert set(metadata) == set("abcde")
    assert (one.builds, other.builds) == (2, 1)


def test_a_workspace_only_grows_and_not_once_locked() -> None:
    workspace = Workspace(CPU)
    first = workspace.get(100)
    first.fill_(3)
    assert (first.dtype, first.numel(), workspace.get(50).data_ptr()) == (torch.uint8, 100, first.data_ptr())
    assert workspace.get(200).numel() == workspace.size_bytes == 200
    assert first.tolist() == [3] * 100
    workspace.lock()
    assert workspace.get(200).numel() == 200
    with pytest.raises(WrongStateError, match="201 bytes of workspace requested, locked at 200"):
        workspace.get(201)
    with pytest.raises(InvalidArgumentError, match="size_bytes: -1"):
        workspace.get(-1)


@pytest.mark.parametrize(
    ("backends", "shared", "why"),
    [
        ({"f0": FLASH}, {}, "backends: layer 'f1' has no backend"),
        (BACKENDS | {"x": FLASH}, {}, "backends: layer 'x' is in no group"),
        (BACKENDS | {"m": FLASH}, {}, "backends: layer 'm': 'flash_attn' does not support a MambaSpec"),
        (BACKENDS, {"s": "x"}, "shared_layers: layer 's' cannot share the cache of 'x'"),
        (BACKENDS, {"f0": "f1"}, "shared_layers: layer 'f0' cannot share"),
    ],
)
def test_layers_without_a_backend_and_backends_without_a_layer_are_refused(
    backends: dict[str, AttentionBackend], shared: dict[str, str], why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        Rank(GROUPS, backends, shared=shared)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_computed_tokens": np.zeros(0, int)}, r"num_computed_tokens: shape \(0,\)"),
        ({"num_scheduled_tokens": np.array([1])}, r"num_scheduled_tokens: shape \(1,\) for 2 requests"),
        ({"num_scheduled_tokens": np.array([1, 0])}, "num_scheduled_tokens: 0 is not in"),
        ({"num_computed_tokens": np.array([-1, 0])}, "num_computed_tokens: -1 is not in"),
        ({"encoder_seq_lens": np.array([1])}, r"encoder_seq_lens: shape \(1,\)"),
        ({"encoder_rows": [0]}, "encoder_seq_lens: missing"),
        ({"encoder_rows": [2], "encoder_seq_lens": np.array([1, 1])}, "encoder_rows: 2 is not in"),
    ],
)
def test_steps_are_checked(change: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        replace(STEP, **change)


def test_a_step_with_more_requests_than_rows_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"5 is not in \[1, 4\]"):
        StepBuffers(OPTIONS, CPU).stage(ScheduledStep(np.zeros(5, int), np.ones(5, int)))
