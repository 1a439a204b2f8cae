"""A schedule for vLLM's own manager and a pool. After each call all that can be seen of both is compared.

Import it where vLLM 0.32 or later is installed.
"""

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.manager_pair import BLOCK_SIZE, SESSION_NUMBER, ManagerPair, RequestPair, make_groups
from kvpool.client.vllm.versions import IS_0_33_OR_NEWER
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import BlockId, PoolName, SessionId, StepNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    num_draft_blocks,
)
from kvpool.core.specs.pool_config import HashScheme, PoolConfig
from support.integrity import check_integrity

MAX_MODEL_LEN: Final = 160
STATES: Final = -1
_MAX_RUNNING: Final = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """A pool. A group is given by its window: 0 for full attention, negative for chunks of that number of tokens.

    STATES is for states that are kept at the ends of steps.

    Attributes:
        block_sizes: Tokens of the blocks of each group; empty for `BLOCK_SIZE` in all.
        states: Spec of the groups of states; they get the block sizes.
        undrafted: The groups without layers of the EAGLE draft model.
        num_lookahead_tokens: Tokens after its block that a hash covers.
        unit: Tokens of a hash, if hits can end within blocks.
        num_modules: Of the drafter: that many tokens, less one, can be computed again.
        replays: Whether windows take no part in hits, of whose end as many tokens are computed again.
    """

    windows: tuple[int, ...]
    retention_tokens: int | None
    use_eagle: bool = False
    block_sizes: tuple[int, ...] = ()
    states: MambaSpec | None = None
    undrafted: tuple[int, ...] = ()
    num_lookahead_tokens: int = 0
    unit: int = 0
    replays: bool = False
    num_modules: int = 1

    @property
    def specs(self) -> list[KVCacheSpec]:
        sizes = self.block_sizes or (BLOCK_SIZE,) * len(self.windows)
        return [
            replace(self.states, block_size=size)
            if window == STATES and self.states
            else _spec(window, size, replays=self.replays)
            for window, size in zip(self.windows, sizes, strict=True)
        ]


def _spec(window: int, block_size: int, *, replays: bool) -> KVCacheSpec:
    if window < 0:
        return ChunkedLocalAttentionSpec(block_size, attention_chunk_size=-window)
    if replays and window:
        return SlidingWindowMLASpec(block_size, sliding_window=window, bounded_replay=True)
    return SlidingWindowSpec(block_size, sliding_window=window) if window else FullAttentionSpec(block_size)


class Program:
    """A schedule drawn from a seed, as a scheduler with too few blocks makes it.

    Attributes:
        num_hits: Look-ups that found something.
        num_shared_prefix_boundaries: Look-ups that found a junction.
        num_refusals: Allocations that found too few blocks.
        is_apart: Whether vLLM found a hit with EAGLE that ours does not take, and why is known; then it ends there.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self._random = random.Random(f"{shape}{seed}")
        num_blocks = self._random.choice([8, 12, 20, 40]) * len(shape.windows) + 1
        self._shape = shape
        self._pair = ManagerPair(
            PoolConfig(
                PoolName("m"),
                num_blocks,
                MAX_MODEL_LEN,
                make_groups(shape.specs, shape.undrafted),
                use_eagle=shape.use_eagle,
                hash_scheme=HashScheme(num_lookahead_tokens=shape.num_lookahead_tokens),
                num_reprefillable_tokens=shape.num_modules - 1,
                retention_tokens=shape.retention_tokens,
                keeps_block_before_boundary=IS_0_33_OR_NEWER and shape.use_eagle,
                shares_read_states=IS_0_33_OR_NEWER,
                prefix_match_unit=shape.unit,
                partial_hits=shape.unit > 0,
            )
        )
        self._manager, self._pool = self._pair.manager, self._pair.pool
        self._session = Session(SessionId("s"), SESSION_NUMBER, "", 10.0, 0.0)
        self._pool.sessions[self._session.session_number] = self._session
        self._families = [self._tokens(MAX_MODEL_LEN) for _ in range(3)]
        self._waiting: list[RequestPair] = []
        self._running: list[RequestPair] = []
        self._count = 0
        self._step = StepNumber(1)
        self._scheduled: set[str] = set()  # requests of the step
        self._drafts = shape.use_eagle or shape.num_lookahead_tokens > 0
        self.num_hits = self.num_shared_prefix_boundaries = self.num_refusals = self.num_copies = 0
        self.is_apart = False

    def run(self, num_calls: int) -> None:
        calls = (self._arrive, self._admit, self._go_on, self._preempt, self._finish, self._evict, self._reset)
        weights = (4, 10, 30, 1, 2, 0.5, 0.5)
        for i in range(num_calls):
            if self._random.random() < 0.3:
                self._begin_step()
            self._random.choices(calls, weights)[0]()
            if self.is_apart:
                return
            self._pair.compare(self._running)
            if i % 20 == 0:
                check_integrity(self._pool, [self._session])
        for both in [*self._running]:
            self._free(both)
        self._pair.compare(self._running)
        check_integrity(self._pool, [self._session])

    def _begin_step(self) -> None:
        """States that a step fills are hit in later steps only. No request is admitted in a step that frees blocks."""
        self._manager.take_new_block_ids()
        copies, retained = self._manager.take_kv_cache_block_copies()
        ours = sorted(self._session.copies, key=lambda copy: copy.group_id)
        assert [(copy.source, copy.target) for copy in ours] == [tuple(each) for each in copies]
        self.num_copies += len(copies)
        if copies:
            self._manager.block_pool.free_blocks(retained)
            self._pool.release_copies(self._session, self._step)
        self._manager.new_step_starts()
        self._step = StepNumber(self._step + 1)
        self._scheduled.clear()

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, 1000) for _ in range(count)]

    def _arrive(self) -> None:
        """A request whose prompt begins like others, or goes on where one of them ended."""
        family = self._random.choice(self._families)
        common = self._random.choice([self._random.randrange(1, 100), 4 * self._random.randrange(1, 25)])
        own = self._random.choice([0, 0, 1, 4, self._random.randrange(40)])
        prompt = family[:common] + self._tokens(own)
        if self._random.random() < 0.1:  # a branch that others may take, too
            self._families[self._random.randrange(len(self._families))] = prompt + self._tokens(MAX_MODEL_LEN)
        self._count += 1
        both = self._pair.make_request(self._count, prompt)
        both.ours.copies = self._session.copies
        self._session.add(both.ours)
        self._session.num_tokens += both.ours.num_tokens
        self._waiting.append(both)

    def _admit(self) -> None:
        if not self._waiting or len(self._running) == _MAX_RUNNING:
            return
        both = self._waiting[0]
        found, num_found, junction = self._manager.get_computed_blocks(both.theirs)
        both.theirs.shared_prefix_boundary = junction
        computed = self._pool.get_computed_blocks(both.ours)
        expected = [list(ids) for ids in found.get_block_ids()]
        if computed.num_tokens < num_found and self._lacks_block_after(both, num_found):
            self.is_apart = True
            return
        cached = [spec.is_cached for spec in self._shape.specs]
        found_ids = [[*ids] if is_cached else [] for ids, is_cached in zip(computed.block_ids, cached, strict=True)]
        assert (computed.num_tokens, found_ids) == (num_found, expected)
        if self._shape.retention_tokens is not None:
            assert computed.shared_prefix_boundary_tokens == junction
        self.num_hits += num_found > 0
        self.num_shared_prefix_boundaries += junction > 0
        if self._random.random() < 0.1:  # it waits, and is looked up again
            return
        replayed = min(max(spec.num_replayed_tokens for spec in self._shape.specs), num_found)
        hit: tuple[Any, ComputedBlocks | None, int] = (found, computed, replayed)
        if replayed and replayed == num_found:  # then vLLM takes no hit
            hit, num_found, replayed = (self._manager.empty_kv_cache_blocks, None, 0), 0, 0
        if self._allocate(both, self._chunk(both, num_found - replayed), hit):
            self._running.append(self._waiting.pop(0))
        elif not self._running:  # it never fits
            self._session.forget(self._waiting.pop(0).ours)
        elif self._random.random() < 0.5:
            self._free(self._running[0])

    def _lacks_block_after(self, both: RequestPair, num_found: int) -> bool:
        """Whether vLLM's hit rests on what an EAGLE draft may have meant for another token.

        It checks that of a group at the length that this group agreed to first, not at what others shortened that to.
        """
        config, hashes = self._pair.config, both.theirs.block_hashes
        at = num_found // config.hash_block_size
        after = [hashes[at + span // config.hash_block_size - 1] for span in config.spans_tokens]
        find = self._manager.block_pool.get_cached_block
        return self._shape.use_eagle and any(not find(block_hash, [i]) for i, block_hash in enumerate(after))

    def _chunk(self, both: RequestPair, num_found: int) -> int:
        """Tokens of the next step of a prompt.

        A step that begins within a block of states ends in it, as vLLM's scheduler has it. Else vLLM's manager, but not
        the pool, caches the state before the step as that after the block.
        """
        start = both.ours.num_computed_tokens + num_found
        sizes = [spec.block_size for spec in self._shape.specs if isinstance(spec, MambaSpec)]
        left = min(
            both.ours.num_tokens - start, *(size - start % size for size in sizes if start % size), MAX_MODEL_LEN
        )
        tail = (both.ours.num_prompt_tokens - 1) // self._shape.unit * self._shape.unit if self._shape.unit else 0
        if start < tail and self._random.random() < 0.4:  # where vLLM's scheduler ends a step
            return min(left, tail - start)
        return min(left, self._random.choice([3, 8, 16, 1000]))

    def _go_on(self) -> None:
        """The next chunk of a prompt, or a decode, with EAGLE of drafts of which some are thrown away."""
        if not self._running:
            return
        both = self._random.choice(self._running)
        ours = both.ours
        if ours.num_tokens - ours.num_computed_tokens > 0:
            if not self._allocate(both, self._chunk(both, 0)):
                self._preempt()
            return
        if ours.num_tokens + 5 > MAX_MODEL_LEN:
            self._free(both)
            return
        both.grow(self._tokens(1))
        self._session.num_tokens += 1
        has_drafts = self._drafts or any(num_draft_blocks(spec) for spec in self._shape.specs)
        drafts = self._random.randrange(4) if has_drafts else 0
        if not self._allocate(both, 1 + drafts):
            self._preempt()
            return
        accepted = self._random.randint(0, drafts)
        if not self._pool.can_reject(ours, ours.num_computed_tokens - (drafts - accepted)):
            accepted = drafts
        both.grow(self._tokens(accepted))
        self._session.num_tokens += accepted
        both.keep(ours.num_computed_tokens - (drafts - accepted))
        if self._shape.num_lookahead_tokens and self._random.random() < 0.8:
            both.grow(self._tokens(1))
            self._session.num_tokens += 1
            both.cache(self._manager, self._pool, self._step)

    def _allocate(
        self, both: RequestPair, count: int, hit: tuple[Any, ComputedBlocks | None, int] | None = None
    ) -> bool:
        if both.theirs.request_id in self._scheduled:
            self._begin_step()
        self._scheduled.add(both.theirs.request_id)
        found, computed, replayed = hit or (None, None, 0)
        num_found = computed.num_tokens if computed else 0
        count, back = max(count - replayed, 0), max(replayed - count, 0)
        lookahead = self._random.randrange(3) if self._drafts else 0
        room = self._manager.allocate_slots(
            both.theirs,
            count,
            num_new_computed_tokens=num_found,
            new_computed_blocks=found,
            num_lookahead_tokens=lookahead,
        )
        new = self._pool.allocate_slots(both.ours, count, lookahead, computed, sequence=self._step)
        expected = None if room is None else [list(ids) for ids in room.get_block_ids()]
        assert (None if new is None else [list(ids) for ids in new]) == expected
        if new is None:
            self.num_refusals += 1
            return False
        both.compute(num_found + count)
        if back:
            assert self._pool.can_reject(both.ours, both.ours.num_computed_tokens - back)
            both.keep(both.ours.num_computed_tokens - back)
        return True

    def _preempt(self) -> None:
        if not self._running:
            return
        both = self._running.pop()
        self._pair.preempt(both)
        self._begin_step()
        self._waiting.insert(0, both)

    def _finish(self) -> None:
        if self._running:
            self._free(self._random.choice(self._running))

    def _free(self, both: RequestPair) -> None:
        self._running.remove(both)
        self._pair.free(both)
        self._begin_step()
        self._session.forget(both.ours)
        if self._random.random() < 0.3:  # a chat that goes on
            self._families[self._random.randrange(len(self._families))] = [
                *both.theirs.all_token_ids,
                *self._tokens(MAX_MODEL_LEN),
            ]

    def _evict(self) -> None:
        """Evicts held blocks, too. vLLM caches some of them again later: states, larger blocks of full attention."""
        hash_size = self._pair.config.hash_block_size
        specs = self._shape.specs
        if any(isinstance(s, MambaSpec) or (s.keeps_all and s.block_size > hash_size) for s in specs):
            return
        num_blocks = self._pool.blocks.num_blocks
        block_ids = set(self._random.sample(range(1, num_blocks), min(5, num_blocks - 1)))
        self._manager.evict_blocks(block_ids)
        self._pool.blocks.evict_blocks(map(BlockId, block_ids))

    def _reset(self) -> None:
        if self._random.random() < 0.3:
            for both in [*self._running]:
                self._free(both)
        assert self._pool.reset_prefix_cache() == self._manager.reset_prefix_cache()
