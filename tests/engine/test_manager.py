"""Pools answer what vLLM's own KV cache manager answers, for thousands of random schedules.

Run it where vLLM 0.32 or later is installed.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

import pytest

from engine.manager_pair import BLOCK_SIZE
from engine.manager_program import STATES, Program, Shape
from kvpool.client.vllm.versions import IS_0_33_OR_NEWER
from kvpool.core.specs.kinds import MambaSpec

pytestmark = pytest.mark.complete

SEEDS = int(os.environ.get("KVPOOL_ENGINE_SEEDS", "10"))
RETENTIONS = (None, 0, 4, 8, 16, 32, 64)
FEW_RETENTIONS = (None, 0, 8, 32)
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
REPLAYED = ((0, 6), (0, 9), (0, 0, 21), (21, 0), (0, 12, 12))
WITH_MODULES = ((0,), (0, 0), (0, 9), (9, 0))
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
WHOLE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "smaller_states": ((0, STATES), (8, 4)),
    "a_larger_window": ((0, 10, STATES), (4, 8, 16)),
}
"""States beside blocks of other sizes, where hits end with whole blocks: windows and block sizes."""


Cases = Iterator[tuple[str, Shape]]
"""What differs from a plain pool, and shapes."""


def _of_windows() -> Cases:
    for windows, tokens in product([*WINDOWS, *WITH_CHUNKS], RETENTIONS):
        if max(windows) > 0 or not tokens:
            yield "plain", Shape(windows, tokens)
            if tokens in FEW_RETENTIONS:
                yield "ahead", Shape(windows, tokens, num_lookahead_tokens=1)
    for windows, tokens in product(WINDOWS, RETENTIONS):
        yield "eagle", Shape(windows, tokens, use_eagle=True)
    for (windows, undrafted), tokens in product(DRAFTED_IN_PART, FEW_RETENTIONS):
        yield "eagle_in_part", Shape(windows, tokens, use_eagle=True, undrafted=undrafted)
    for windows, use_eagle in product(REPLAYED, (False, True)):
        yield "replayed", Shape(windows, None, use_eagle, replays=True)
    for windows, num_ahead in product(WITH_MODULES, (0, 3)):
        # Where hashes do not cover the tokens that the modules read, the last block of a hit is computed again.
        yield "modules", Shape(windows, None, not num_ahead, num_lookahead_tokens=num_ahead, num_modules=3)


def _of_sizes() -> Cases:
    """Windows are kept at each multiple of a number of common blocks; at 1, vLLM is given no interval."""
    for (windows, sizes), num_blocks in product(SIZES.items(), (0, 1, 2, 4)):
        if any(windows) or not num_blocks:
            sized = Shape(windows, num_blocks * math.lcm(*sizes), block_sizes=sizes)
            yield "sizes", sized
            # vLLM keys larger blocks of full attention by earlier hashes until their own are known.
            if num_blocks != 2 and all(
                window or size == min(sizes) for window, size in zip(windows, sizes, strict=True)
            ):
                yield "sizes_ahead", replace(sized, num_lookahead_tokens=1)


def _of_states(kind: str) -> Cases:
    states, use_eagle = STATE_KINDS[kind]
    for windows, tokens in product(WITH_STATES, FEW_RETENTIONS):
        yield kind, Shape(windows, tokens, use_eagle, states=states)
        if not use_eagle and tokens != 32:
            yield f"{kind}_ahead", Shape(windows, tokens, states=states, num_lookahead_tokens=1)
    for (name, (windows, sizes, unit)), num_blocks in product(PARTIAL.items(), (None, 0, 1, 2)):
        if not use_eagle or max(windows) <= 0:  # refused: EAGLE beside sliding windows
            tokens = None if num_blocks is None else num_blocks * math.lcm(*sizes)
            yield f"{kind}_{name}", Shape(windows, tokens, use_eagle, sizes, states, unit=unit)
    for (name, (windows, sizes)), num_blocks in product(WHOLE.items(), () if use_eagle else (0, 1, 2)):
        yield f"{kind}_{name}", Shape(windows, num_blocks * math.lcm(*sizes), block_sizes=sizes, states=states)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=f"{name}-{'_'.join(map(str, shape.windows))}-{shape.retention_tokens}")
        for name, shape in chain(_of_windows(), _of_sizes(), *map(_of_states, STATE_KINDS))
        if IS_0_33_OR_NEWER or not shape.num_lookahead_tokens
    ],
)
def test_answers_are_those_of_the_manager(shape: Shape) -> None:
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
