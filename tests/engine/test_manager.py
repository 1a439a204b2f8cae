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
from kvpool.client.vllm.versions import KEEPS_BLOCK_BEFORE_JUNCTION
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


def _run(  # noqa: PLR0913 - what a program is made of
    windows: tuple[int, ...],
    retention_tokens: int | None,
    sizes: tuple[int, ...] = (),
    *,
    use_eagle: bool,
    states: MambaSpec | None = None,
    unit: int = 0,
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        program = Program(Shape(windows, retention_tokens, use_eagle, sizes, states, unit), seed)
        try:
            program.run(200)
        except AssertionError as error:
            error.add_note(f"seed {seed} of {windows}, retention {retention_tokens}, EAGLE {use_eagle}")
            raise
        counts.update(
            hits=program.num_hits, junctions=program.num_shared_prefix_boundaries, refusals=program.num_refusals
        )
        counts["apart"] += program.is_apart
        counts["copies"] += program.num_copies
    print(windows, retention_tokens, use_eagle, dict(counts))
    assert counts["hits"]
    assert counts["refusals"]
    assert counts["copies"] or not unit
    # Only where three kinds of groups have to agree, and then seldom.
    assert counts["apart"] <= (SEEDS // 10 if use_eagle and len({*windows}) > 1 else 0)


@pytest.mark.parametrize("retention_tokens", RETENTIONS, ids=_id)
@pytest.mark.parametrize("windows", [*WINDOWS, *WITH_CHUNKS], ids=_id)
def test_answers_are_those_of_the_manager(windows: tuple[int, ...], retention_tokens: int | None) -> None:
    if retention_tokens and max(windows) <= 0:
        pytest.skip("there is no window")
    _run(windows, retention_tokens, use_eagle=False)


@pytest.mark.parametrize("retention_tokens", RETENTIONS, ids=_id)
@pytest.mark.parametrize("windows", WINDOWS, ids=_id)
def test_answers_with_eagle_are_those_of_the_manager(windows: tuple[int, ...], retention_tokens: int | None) -> None:
    if KEEPS_BLOCK_BEFORE_JUNCTION and retention_tokens is not None and any(windows):
        pytest.skip("refused: this version caches more blocks of windows with EAGLE")
    _run(windows, retention_tokens, use_eagle=True)


@pytest.mark.parametrize("num_hits", [0, 1, 2, 4])
@pytest.mark.parametrize("windows", SIZES, ids=_id)
def test_answers_over_different_block_sizes_are_those_of_the_manager(windows: tuple[int, ...], num_hits: int) -> None:
    """Windows are kept at each multiple of a number of hits; at 1, vLLM is given no interval."""
    if num_hits and not any(windows):
        pytest.skip("there is no window")
    _run(windows, num_hits * math.lcm(*SIZES[windows]), SIZES[windows], use_eagle=False)


@pytest.mark.parametrize("retention_tokens", [None, 0, 8, 32], ids=_id)
@pytest.mark.parametrize("windows", WITH_STATES, ids=_id)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_answers_over_states_are_those_of_the_manager(
    kind: str, windows: tuple[int, ...], retention_tokens: int | None
) -> None:
    states, use_eagle = STATE_KINDS[kind]
    _run(windows, retention_tokens, use_eagle=use_eagle, states=states)


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
    _run(windows, retention_tokens, sizes, use_eagle=use_eagle, states=states, unit=unit)


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
    _run(windows, num_blocks * math.lcm(*sizes), sizes, use_eagle=False, states=states)
