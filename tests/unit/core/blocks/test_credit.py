"""Credit of requests, compared with the changes that a full allocation makes."""

from collections.abc import Callable
from copy import deepcopy
from typing import Final

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.sessions.request import Request
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from support.core import STEP, config, request_of, snapshot

SKIPPING: Final = [
    *(SlidingWindowSpec(4, sliding_window=window) for window in (1, 2, 4, 5, 9)),
    *(ChunkedLocalAttentionSpec(4, attention_chunk_size=chunk) for chunk in (1, 3, 4, 8, 10)),
    MambaSpec(4),
    MambaSpec(4, num_speculative_blocks=2),
]
KEEPING: Final = [
    FullAttentionSpec(4),
    FullAttentionSpec(4, sliding_window=6),
    MLAAttentionSpec(4),
    SinkFullAttentionSpec(4, sink_len=4),
    CrossAttentionSpec(4),
    EncoderOnlyAttentionSpec(4),
]
FULL, WINDOW, STATE = FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=6), MambaSpec(4)
MIXES: Final[dict[str, list[KVCacheSpec]]] = {
    "full": [FULL],
    "latent": [MLAAttentionSpec(4)],
    "window": [WINDOW],
    "chunk": [ChunkedLocalAttentionSpec(4, attention_chunk_size=6)],
    "state": [STATE],
    "state with drafts": [MambaSpec(4, num_speculative_blocks=2)],
    "sinks": [SinkFullAttentionSpec(4, sink_len=8)],
    "full, window": [FULL, WINDOW],
    "full, chunk": [FULL, ChunkedLocalAttentionSpec(4, attention_chunk_size=8)],
    "window, state, other sizes": [SlidingWindowSpec(2, sliding_window=5), MambaSpec(8, num_speculative_blocks=1)],
    "full, two windows": [FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=3), WINDOW],
}
ENCODING: Final[dict[str, list[KVCacheSpec]]] = {
    "cross": [CrossAttentionSpec(4)],
    "full, cross": [FULL, CrossAttentionSpec(4)],
}
NUM_TOKENS: Final = 32  # whole blocks of all sizes


@pytest.mark.parametrize("spec", SKIPPING, ids=repr)
def test_num_computed_to_skip_is_the_inverse_of_num_skipped_tokens(spec: KVCacheSpec) -> None:
    for num_tokens in range(1, 100):
        num_computed = spec.num_computed_to_skip(num_tokens)
        assert spec.num_skipped_tokens(num_computed - 1) < num_tokens <= spec.num_skipped_tokens(num_computed)


@pytest.mark.parametrize("spec", KEEPING, ids=repr)
def test_kinds_that_keep_all_never_skip(spec: KVCacheSpec) -> None:
    assert spec.num_skipped_tokens(MAX_TOKENS) == 0
    assert spec.num_computed_to_skip(1) > MAX_TOKENS


class Driven:
    """A pool and one request with a given number of known tokens."""

    def __init__(
        self, specs: list[KVCacheSpec], *, num_known: int = NUM_TOKENS, num_blocks: int = 35, **options: bool
    ) -> None:
        self.pool = KVCacheManager(config(num_blocks, specs=specs, **options))
        self.request: Request = request_of(self.pool, "abcdefghijklmnopqrstuvwxyz", num_known)

    @property
    def credit(self) -> int:
        """Number of tokens that the request can compute on credit."""
        return self.request.credit_tokens - self.request.num_computed_tokens

    def view(self) -> tuple[object, ...]:
        """The visible state, including the request's credit, without its computed tokens."""
        return snapshot(self.pool, []), repr(self.request.tables), self.request.credit_tokens

    def allocate(self, num_new_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0) -> None:
        new = self.pool.allocate_slots(
            self.request,
            num_new_tokens,
            num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            sequence=STEP,
        )
        assert new is not None

    def changes(self, num_new_tokens: int, num_lookahead_tokens: int = 0, *, in_full: bool) -> bool:
        """Whether an allocation would change more than the computed tokens and the counter of allocations.

        Args:
            num_new_tokens: Tokens that need a slot.
            num_lookahead_tokens: Further tokens that need a slot.
            in_full: Whether the pool allocates without using the credit.
        """
        copy = deepcopy(self)
        before, end_tokens = copy.view(), copy.request.num_computed_tokens + num_new_tokens
        if in_full:
            copy.request.credit_tokens = 0
        copy.allocate(num_new_tokens, num_lookahead_tokens)
        assert copy.request.num_computed_tokens == end_tokens
        assert copy.pool.activity.allocations == self.pool.activity.allocations + 1
        copy.pool.activity.allocations -= 1
        return copy.view() != before

    def check_credit(self, num_lookahead_tokens: int = 0) -> None:
        """Tokens within the credit change nothing, whether the pool uses the credit or allocates in full."""
        for num_new_tokens in range(1, self.credit - num_lookahead_tokens + 1):
            assert not self.changes(num_new_tokens, num_lookahead_tokens, in_full=False)
            assert not self.changes(num_new_tokens, num_lookahead_tokens, in_full=True)

    def check_end(self) -> None:
        """After the credit is used up, one more token changes something.

        In one allocation together with the credit it need not: windows move by the tokens that were computed before.
        """
        copy = deepcopy(self)
        if copy.credit > 0:
            copy.allocate(copy.credit)
        assert copy.changes(1, in_full=False)

    def advance(self, num_lookahead_tokens: int = 0) -> None:
        """Uses up the credit and one more token, as long as tokens remain."""
        left = NUM_TOKENS - self.request.num_computed_tokens
        self.allocate(min(max(self.credit, 0) + 1, left), num_lookahead_tokens)

    def check_all(self) -> None:
        """Up to the last token, the credit is exact."""
        while not self.is_done:
            self.check_credit()
            self.check_end()
            self.advance()

    @property
    def is_done(self) -> bool:
        return self.request.num_computed_tokens >= NUM_TOKENS


@pytest.mark.parametrize(("enable_caching", "use_eagle"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("mix", MIXES)
def test_the_credit_is_exact(mix: str, *, enable_caching: bool, use_eagle: bool) -> None:
    """One more token takes a block, caches one or leaves one behind a window."""
    for num_prompt_tokens in (3, 8):
        driven = Driven(MIXES[mix], enable_caching=enable_caching, use_eagle=use_eagle)
        driven.allocate(num_prompt_tokens)
        driven.check_all()


@pytest.mark.parametrize("enable_caching", [False, True])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_lookahead_tokens", [1, 3, 6])
def test_with_look_ahead_the_credit_is_a_lower_bound(
    mix: str, num_lookahead_tokens: int, *, enable_caching: bool
) -> None:
    """Look-ahead tokens are not cached and move no window, but count as if they did."""
    driven = Driven(MIXES[mix], enable_caching=enable_caching)
    driven.allocate(5, num_lookahead_tokens)
    while not driven.is_done:
        driven.check_credit()
        driven.check_credit(num_lookahead_tokens)
        driven.advance(num_lookahead_tokens)


@pytest.mark.parametrize("mix", MIXES)
def test_with_unknown_tokens_the_credit_is_a_lower_bound(mix: str) -> None:
    """A block of unknown tokens is not cached, but ends the credit."""
    driven = Driven(MIXES[mix], num_known=6)
    driven.allocate(5)
    while not driven.is_done:
        driven.check_credit()
        driven.advance()


@pytest.mark.parametrize("mix", MIXES)
def test_the_credit_is_exact_after_a_hit(mix: str) -> None:
    driven = Driven(MIXES[mix])
    driven.allocate(26)
    driven.pool.free(driven.request)
    assert driven.pool.admit(driven.request, 1, sequence=STEP)
    assert driven.request.num_computed_tokens > 1
    driven.check_all()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_rejected_tokens", [1, 3])
def test_the_credit_is_exact_after_a_rejection(mix: str, num_rejected_tokens: int) -> None:
    driven = Driven(MIXES[mix])
    driven.allocate(21)
    driven.request.num_computed_tokens -= num_rejected_tokens
    if not driven.pool.can_reject(driven.request, driven.request.num_computed_tokens):
        return
    driven.check_credit()
    driven.check_end()


@pytest.mark.parametrize("mix", ENCODING)
def test_encoder_tokens_do_not_bound_the_credit(mix: str) -> None:
    driven = Driven(ENCODING[mix], enable_caching=False)
    driven.allocate(5, num_encoder_tokens=7)
    driven.check_credit()
    assert driven.request.credit_tokens == (8 if FULL in ENCODING[mix] else driven.pool.config.max_model_len)


def test_uncached_full_blocks_leave_no_credit_until_they_are_cached() -> None:
    driven = Driven([FULL])
    driven.pool.allocate_slots(driven.request, 9, delay_cache_blocks=True, sequence=STEP)
    assert driven.credit < 0
    assert driven.changes(1, in_full=False)
    driven.allocate(1)
    assert driven.request.credit_tokens == 11


def test_the_credit_ends_at_max_model_len() -> None:
    driven = Driven([FULL], num_known=256, num_blocks=80, enable_caching=False)
    driven.allocate(190, num_lookahead_tokens=100)
    assert driven.request.credit_tokens == 256


@pytest.mark.parametrize("leave", [KVCacheManager.free, KVCacheManager.preempt])
def test_a_request_without_blocks_has_no_credit(leave: Callable[[KVCacheManager, Request], None]) -> None:
    driven = Driven([FULL])
    assert driven.request.credit_tokens == 0
    driven.allocate(5)
    assert driven.credit == 2
    leave(driven.pool, driven.request)
    assert driven.request.credit_tokens == 0
