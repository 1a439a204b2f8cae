"""Pools answer what vLLM's own KV cache manager answers, for thousands of random schedules.

Run it where vLLM 0.32 or later is installed.
"""

import math
import os
from collections import Counter
from dataclasses import replace

import pytest

from engine.manager_pair import BLOCK_SIZE
from engine.manager_program import STATES, Program, Shape
from kvpool.client.vllm.versions import HASHES_LOOK_AHEAD
from kvpool.core.specs.kinds import MambaSpec

pytestmark = pytest.mark.complete

SEEDS = int(os.environ.get("KVPOOL_ENGINE_SEEDS", "10"))
RETENTIONS = (None, 0, 4, 8, 16, 32, 64)
WINDOWS = (
    (6,),
    (20,),
    (0, 4),
    (0, 9),
    (0, 24),
    (9, 0),
    (0, 12, 12, 12),
    (0, 0, 7),
    (0, 5, 21),
    (9, 21),
    (21, 9, 21),
)
SIZES: dict[tuple[int, ...], tuple[int, ...]] = {
    (0, 10): (4, 8),
    (0, 10, 10): (4, 8, 8),
    (0, 14): (8, 4),
    (0, 30): (8, 12),
    (0, 9, 21): (4, 8, 16),
    (9, 21): (4, 8),
    (21, 9): (4, 8),
    (0, 0): (4, 8),
    (0, 0, 12): (8, 4, 4),
}
"""Groups of different block sizes: block sizes by windows. Hits are multiples of 8, 16 or 24 tokens."""
DRAFTED_IN_PART = (
    ((0, 9), (1,)),
    ((0, 9), (0,)),
    ((9, 0), (0,)),
    ((0, 12, 12, 12), (1, 2, 3)),
    ((0, 0, 7), (2,)),
    ((0, 5, 21), (1, 2)),
    ((0, 5, 21), (0, 2)),
    ((9, 21), (1,)),
    ((21, 9, 21), (0, 2)),
)
"""Windows, and the groups without layers of the EAGLE draft model: those of equal windows, as vLLM has it."""
WITH_CHUNKS = ((0, -16), (0, 9, -12))


WITH_STATES = ((0, STATES), (0, STATES, STATES), (STATES,), (STATES, 0), (0, 9, STATES), (9, STATES))
_STATES = MambaSpec(BLOCK_SIZE, only_step_ends=True)
_EXPORTED = replace(_STATES, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
_WITH_DRAFTS = replace(_STATES, num_speculative_blocks=3)
STATE_KINDS = {
    "states": (_STATES, False),
    "exported": (_EXPORTED, False),
    "exported_aligned": (replace(_EXPORTED, prefill_checkpoint_alignment=8), False),
    "drafts": (_WITH_DRAFTS, False),
    "drafts_with_eagle": (_WITH_DRAFTS, True),
    "exported_with_drafts": (replace(_EXPORTED, num_speculative_blocks=2), False),
}
"""By name: the spec of states, and whether there is EAGLE."""


def _id(value: object) -> str:
    return "_".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _run(shape: Shape) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        program = Program(shape, seed)
        try:
            program.run(200)
        except AssertionError as error:
            error.add_note(f"seed {seed} of {shape}")
            raise
        counts.update(
            hits=program.num_hits, junctions=program.num_shared_prefix_boundaries, refusals=program.num_refusals
        )
        counts["apart"] += program.is_apart
        counts["copies"] += program.num_copies
    print(shape, dict(counts))
    assert counts["hits"]
    assert counts["refusals"]
    assert counts["copies"] or not shape.unit
    # Only where three kinds of groups have to agree.
    assert counts["apart"] <= (SEEDS // 3 if shape.use_eagle and len({*shape.windows}) > 1 else 0)


@pytest.mark.parametrize("retention_tokens", RETENTIONS, ids=_id)
@pytest.mark.parametrize("windows", [*WINDOWS, *WITH_CHUNKS], ids=_id)
def test_answers_are_those_of_the_manager(windows: tuple[int, ...], retention_tokens: int | None) -> None:
    if retention_tokens and max(windows) <= 0:
        pytest.skip("there is no window")
    _run(Shape(windows, retention_tokens))


@pytest.mark.parametrize("retention_tokens", RETENTIONS, ids=_id)
@pytest.mark.parametrize("windows", WINDOWS, ids=_id)
def test_answers_with_eagle_are_those_of_the_manager(windows: tuple[int, ...], retention_tokens: int | None) -> None:
    _run(Shape(windows, retention_tokens, use_eagle=True))


@pytest.mark.parametrize("retention_tokens", [None, 0, 8, 32], ids=_id)
@pytest.mark.parametrize(("windows", "undrafted"), DRAFTED_IN_PART, ids=_id)
def test_answers_with_eagle_in_some_groups_are_those_of_the_manager(
    windows: tuple[int, ...], undrafted: tuple[int, ...], retention_tokens: int | None
) -> None:
    _run(Shape(windows, retention_tokens, use_eagle=True, undrafted=undrafted))


@pytest.mark.parametrize("num_hits", [0, 1, 2, 4])
@pytest.mark.parametrize("windows", SIZES, ids=_id)
def test_answers_over_different_block_sizes_are_those_of_the_manager(windows: tuple[int, ...], num_hits: int) -> None:
    """Windows are kept at each multiple of a number of hits; at 1, vLLM is given no interval."""
    if num_hits and not any(windows):
        pytest.skip("there is no window")
    _run(Shape(windows, num_hits * math.lcm(*SIZES[windows]), block_sizes=SIZES[windows]))


@pytest.mark.parametrize("retention_tokens", [None, 0, 8, 32], ids=_id)
@pytest.mark.parametrize("windows", WITH_STATES, ids=_id)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_answers_over_states_are_those_of_the_manager(
    kind: str, windows: tuple[int, ...], retention_tokens: int | None
) -> None:
    states, use_eagle = STATE_KINDS[kind]
    _run(Shape(windows, retention_tokens, use_eagle, states=states))


@pytest.mark.skipif(not HASHES_LOOK_AHEAD, reason="hashes cover their block alone in this version")
@pytest.mark.parametrize("retention_tokens", [None, 0, 8, 32], ids=_id)
@pytest.mark.parametrize("windows", [*WINDOWS, *WITH_CHUNKS], ids=_id)
def test_answers_with_hashes_ahead_are_those_of_the_manager(
    windows: tuple[int, ...], retention_tokens: int | None
) -> None:
    if retention_tokens and max(windows) <= 0:
        pytest.skip("there is no window")
    _run(Shape(windows, retention_tokens, num_lookahead_tokens=1))


@pytest.mark.skipif(not HASHES_LOOK_AHEAD, reason="hashes cover their block alone in this version")
@pytest.mark.parametrize("num_hits", [0, 1, 4])
@pytest.mark.parametrize("windows", SIZES, ids=_id)
def test_answers_with_hashes_ahead_of_different_block_sizes_are_those_of_the_manager(
    windows: tuple[int, ...], num_hits: int
) -> None:
    if num_hits and not any(windows):
        pytest.skip("there is no window")
    if any(not window and size > min(SIZES[windows]) for window, size in zip(windows, SIZES[windows], strict=True)):
        pytest.skip("vLLM keys such blocks by earlier hashes until their own are known")
    retention_tokens = num_hits * math.lcm(*SIZES[windows])
    _run(Shape(windows, retention_tokens, block_sizes=SIZES[windows], num_lookahead_tokens=1))


@pytest.mark.skipif(not HASHES_LOOK_AHEAD, reason="hashes cover their block alone in this version")
@pytest.mark.parametrize("retention_tokens", [None, 0, 8], ids=_id)
@pytest.mark.parametrize("windows", WITH_STATES, ids=_id)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_answers_with_hashes_ahead_over_states_are_those_of_the_manager(
    kind: str, windows: tuple[int, ...], retention_tokens: int | None
) -> None:
    states, _ = STATE_KINDS[kind]
    _run(Shape(windows, retention_tokens, states=states, num_lookahead_tokens=1))


PARTIAL: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "larger_states": ((0, STATES), (4, 16), 4),
    "two_groups_of_larger_states": ((0, STATES, STATES), (4, 16, 16), 4),
    "states_of_two_sizes": ((0, STATES, STATES), (4, 8, 16), 4),
    "no_multiples": ((0, STATES), (8, 12), 4),
    "larger_attention": ((0, STATES, STATES), (16, 8, 4), 4),
    "window_of_the_unit": ((0, 10, STATES), (8, 4, 16), 4),
    "window_first": ((10, STATES), (4, 16), 4),
    "states_first": ((STATES, 0), (16, 8), 8),
    "two_attentions": ((0, 0, STATES), (8, 8, 16), 4),
    "two_sizes_of_attention": ((0, 0, STATES), (16, 8, 8), 4),
    "unit_of_its_own": ((0, STATES), (16, 16), 4),
    "unit_of_its_own_and_groups": ((0, STATES, STATES, STATES), (32, 32, 32, 32), 8),
}
"""Hits that end within blocks, by name: windows, block sizes and the tokens of a hash."""


@pytest.mark.parametrize("num_blocks", [None, 0, 1, 2])
@pytest.mark.parametrize("shape", PARTIAL)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_answers_with_partial_hits_are_those_of_the_manager(kind: str, shape: str, num_blocks: int | None) -> None:
    """Windows and states are kept at each multiple of a number of common blocks."""
    states, use_eagle = STATE_KINDS[kind]
    windows, sizes, unit = PARTIAL[shape]
    if use_eagle and max(windows) > 0:
        pytest.skip("refused: EAGLE beside sliding windows")
    retention_tokens = None if num_blocks is None else num_blocks * math.lcm(*sizes)
    _run(Shape(windows, retention_tokens, use_eagle, sizes, states, unit=unit))


@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize("windows", [(0, 6), (0, 9), (0, 0, 21), (21, 0), (0, 12, 12)], ids=_id)
def test_answers_with_replayed_windows_are_those_of_the_manager(windows: tuple[int, ...], *, use_eagle: bool) -> None:
    _run(Shape(windows, None, use_eagle, replays=True))


@pytest.mark.parametrize("num_lookahead_tokens", [0, 3] if HASHES_LOOK_AHEAD else [0])
@pytest.mark.parametrize("windows", [(0,), (0, 0), (0, 9), (9, 0)], ids=_id)
def test_answers_with_several_modules_are_those_of_the_manager(
    windows: tuple[int, ...], num_lookahead_tokens: int
) -> None:
    """Where hashes do not cover the tokens that the modules read, the last block of a hit is computed again."""
    use_eagle = not num_lookahead_tokens
    _run(Shape(windows, None, use_eagle, num_lookahead_tokens=num_lookahead_tokens, num_modules=3))


WHOLE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "smaller_states": ((0, STATES), (8, 4)),
    "a_larger_window": ((0, 10, STATES), (4, 8, 16)),
}
"""States beside blocks of other sizes, where hits end with whole blocks: windows and block sizes."""


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize("kind", [name for name, (_, use_eagle) in STATE_KINDS.items() if not use_eagle])
def test_answers_over_states_beside_other_sizes_are_those_of_the_manager(
    kind: str, shape: str, num_blocks: int
) -> None:
    """Windows and states are kept at each multiple of a number of common blocks."""
    states, _ = STATE_KINDS[kind]
    windows, sizes = WHOLE[shape]
    _run(Shape(windows, num_blocks * math.lcm(*sizes), block_sizes=sizes, states=states))
