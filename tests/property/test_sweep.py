"""A sweep compared with replays at all sizes, for random prompts over few tokens."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.client import ReuseOrder
from kvpool.replay.sweep import sweep
from kvpool.replay.trace_formats import TraceRequest
from support.replays import replayed

ID_TOKENS = 2


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts that share prefixes: a repeated prompt, the start of one, or a start with another continuation."""
    prompts: list[tuple[int, ...]] = [()]
    lengths = st.sampled_from([0, 0, 1])
    trace = []
    for i in range(draw(st.integers(1, 14))):
        before = draw(st.sampled_from(prompts))
        start = before[: draw(st.integers(0, len(before)))]
        ids = start + tuple(range(10 * i, 10 * i + draw(st.integers(0 if start else 1, 3))))
        prompts.append(ids)
        trace.append(TraceRequest(len(ids) * ID_TOKENS - draw(lengths), 0, ids, ID_TOKENS))
    return trace


@given(traces(), st.sampled_from([1, 2, 3, 4]), st.sampled_from(ReuseOrder))
def test_a_sweep_equals_replays_at_all_sizes(trace: list[TraceRequest], block_size: int, order: ReuseOrder) -> None:
    curve = sweep(trace, block_size, order)
    for num_blocks in range(curve.min_blocks, curve.max_blocks + 2):
        found = replayed(trace, num_blocks, block_size, order)
        assert curve.hit_tokens_at(num_blocks) == found.hit_tokens
