"""Random mixes of KV cache groups compared with a model of whole token prefixes: hits, tables, refusals, frees."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.vllm.parents_first import ParentsFirst
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.events import AllBlocksCleared, BlockRemoved, BlockStored, packed_token_ids
from kvpool.core.ids import BlockHash, BlockId, RequestId, RequestNumber, SessionId, SessionNumber, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import SPARSE_KINDS, CrossAttentionSpec, FullAttentionSpec
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from property.mixes import MAX_TOKENS, configs, specs
from property.prefix_model import Content, Known, PrefixModel, Tokens, attends
from support.integrity import check_integrity
from support.router import Router

NOW = StepNumber(1)


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of an allocation."""

    max_new_tokens: int
    num_lookahead_tokens: int
    delay: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"delay_cache_blocks": self.delay, "sequence": NOW}


def story_tokens(story: int, start: int, end: int) -> Tokens:
    """Returns the story's tokens [start, end)."""
    return tuple(story * 10 + i % 7 for i in range(start, end))


@st.composite
def prompts(draw: st.DrawFn) -> Tokens:
    """Prefixes of two stories, some with a different end, so that most of them share a prefix."""
    story, length = draw(st.integers(0, 1)), draw(st.sampled_from([*range(13, MAX_TOKENS - 2), *range(1, 13)]))
    turn, end = draw(st.one_of(st.just(length), st.integers(0, length))), draw(st.integers(2, 3))
    return (*story_tokens(story, 0, turn), *story_tokens(end, turn, length))


CALLS = st.builds(
    Call,
    st.one_of(st.just(MAX_TOKENS), st.integers(1, 24)),
    st.one_of(st.just(0), st.integers(1, 6)),
    st.sampled_from([False, False, False, True]),
)
WHICH = st.integers(0, 7)
SMALL = st.integers(1, 9)


def pick(requests: list[Known], which: int) -> Known | None:
    return requests[which % len(requests)] if requests else None


class World:
    """One pool and the requests of one session, to which all its cached blocks are visible at once."""

    def __init__(self, config: PoolConfig) -> None:
        self.pool = KVCacheManager(config)
        self.model = PrefixModel(config)
        self.session = Session(SessionId("s"), SessionNumber(1), "", 10.0, 0.0)
        self.requests: list[Known] = []
        self.num_added = 0
        self.stored: Counter[tuple[int, BlockHash]] = Counter()
        self.router, self.parents_first = Router(config.hash_block_size), ParentsFirst()
        self.has_full = any(isinstance(spec, FullAttentionSpec) for spec in self.model.specs)

    # What schedulers do. Of what there is nothing to do it to, nothing is done.

    def admit_new(self, tokens: Tokens, call: Call, num_encoder_tokens: int, *, at_once: bool) -> Known:
        known = self.new_request(tokens, num_encoder_tokens)
        self.session.add(known.request)
        self.session.num_tokens += known.request.num_tokens
        self.requests.append(known)
        self.admit(known, call, at_once=at_once)
        return known

    def waiting(self) -> list[Known]:
        return [known for known in self.requests if not known.holds]

    def running(self) -> list[Known]:
        return [known for known in self.requests if known.holds]

    def admit_waiting(self, which: int, call: Call, *, at_once: bool) -> None:
        known = pick(self.waiting(), which)
        if known:
            self.admit(known, call, at_once=at_once)

    def serve(self, prompts: list[Tokens], call: Call) -> None:
        """Runs whole requests one after the other, which leave only cached blocks."""
        for tokens in prompts:
            known = self.admit_new(tokens, call, 3, at_once=True)
            self.check_all()
            self.free(known)

    def lookup(self, tokens: Tokens, step: int) -> None:
        for length in range(len(tokens), 0, -step):
            hit = self.check_hit(self.new_request(tokens[:length], 1))
            self.check_routers(tokens[:length], hit.num_tokens)

    def grow(self, which: int, call: Call, story: int, count: int) -> None:
        """Computes the next chunk of a prompt, or generated tokens and up to three drafts."""
        known = pick(self.running(), which)
        if not known:
            return
        self.append(known, story_tokens(story, len(known.tokens), len(known.tokens) + count))
        left = min(MAX_TOKENS, len(known.tokens) + 3) - known.computed
        if left > 0:
            self.allocate(known, min(call.max_new_tokens, left), call, None, at_once=False)

    def reject(self, which: int, count: int) -> None:
        known = pick(self.running(), which)
        if not known:
            return
        known.computed = max(known.computed - count, known.floor)
        assert self.pool.can_reject(known.request, known.computed)
        known.request.num_computed_tokens = known.computed

    def cache(self, which: int, short: int) -> None:
        known = pick(self.running(), which)
        if not known or not self.model.config.enable_caching:
            return
        num_tokens = max(known.computed - short, 0)
        self.pool.cache_blocks(known.request, num_tokens, sequence=NOW)
        self.model.cache(known, num_tokens)

    def free_or_preempt(self, which: int, *, forget: bool) -> None:
        known = pick(self.requests, which)
        if known and forget:
            self.free(known)
        elif known:
            self.pool.preempt(known.request)
            known.clear()

    def free(self, known: Known) -> None:
        self.pool.free(known.request)
        self.session.forget(known.request)
        self.requests.remove(known)

    def evict(self, first: int, stride: int) -> None:
        """Evicts some cached blocks."""
        for block_id in sorted(self.model.findable)[first::stride]:
            self.pool.blocks.evict_blocks([BlockId(block_id)])
            self.model.evict(block_id)

    def reset(self) -> None:
        # Sinks count as used: a pool that has some is never reset.
        done = not self.running() and not self.model.num_sink_blocks
        assert self.pool.reset_prefix_cache() == done
        if done:
            self.model.findable.clear()

    # How they are answered.

    def new_request(self, tokens: Tokens, num_encoder_tokens: int) -> Known:
        self.num_added += 1
        tables = self.pool.new_tables()
        request = Request(
            RequestId(f"r{self.num_added}"), RequestNumber(self.num_added), self.session.session_number, tables
        )  # fmt: skip
        request.num_prompt_tokens = len(tokens)
        known = Known(request, (), num_encoder_tokens, [0] * len(tables), [0] * len(tables), tokens)
        self.append(known, tokens)
        return known

    def append(self, known: Known, tokens: Sequence[int]) -> None:
        known.tokens = (*known.tokens, *tokens)[:MAX_TOKENS]
        if known.request.number in self.session.by_number:
            self.session.num_tokens += len(known.tokens) - known.request.num_tokens
        known.request.num_tokens = len(known.tokens)
        known.request.token_ids = list(known.tokens)
        known.request.hashes = self.model.hashes(known.tokens)

    def check_hit(self, known: Known) -> ComputedBlocks:
        """The hit is the longest possible one.

        Its blocks hold exactly these tokens, and are null where none is needed.
        """
        model = self.model
        computed = self.pool.find_longest_cache_hit(known.request)
        assert computed.num_tokens == model.longest_hit(known.tokens)
        known.shared_boundary = model.shared_prefix_boundary(known.tokens)
        assert (computed.shared_prefix_boundary_tokens or 0) == known.shared_boundary
        assert computed.num_shared_tokens == 0
        assert len(computed.block_ids) == len(model.spans)
        for group, (span, found) in enumerate(zip(model.spans, computed.block_ids, strict=True)):
            assert len(found) == computed.num_tokens // span
            for i, block_id in enumerate(found):
                if i < model.num_skipped(group, computed.num_tokens):
                    assert not block_id
                else:
                    assert model.findable[block_id] == (group, known.tokens[: (i + 1) * span])
        if model.config.enable_caching:
            assert self.pool.is_still_cached(known.request, computed)
            assert self.pool.check_computed_blocks(str, computed.block_ids) == computed.num_tokens
        return computed

    def admit(self, known: Known, call: Call, *, at_once: bool) -> None:
        hit = self.check_hit(known)
        num_new_tokens = min(call.max_new_tokens, len(known.tokens) - hit.num_tokens)
        self.allocate(known, num_new_tokens, call, hit, at_once=at_once)

    def allocate(
        self, known: Known, num_new_tokens: int, call: Call, hit: ComputedBlocks | None, *, at_once: bool
    ) -> None:
        """Predicts the request's tables, and whether enough blocks are free; then compares with the pool."""
        model, before = self.model, known.tables
        found = [list(blocks) for blocks in hit.block_ids] if hit else [[] for _ in before]
        start = known.computed + (hit.num_tokens if hit else 0)
        num_lacking = model.num_new_blocks(known, start + num_new_tokens + call.num_lookahead_tokens, found)
        nulls = [max(seen, model.num_freed(group, start)) for group, seen in enumerate(known.nulls)]
        skipped: list[list[int]] = [
            [0] * len(table[:count]) + table[count:] for count, table in zip(nulls, before, strict=True)
        ]
        free = self.unheld(known) - set().union(*skipped)
        missing = sum(num_lacking) + len(free & set().union(*found))
        kept = self.kept(known)

        if hit:
            nulls = [model.num_skipped(group, start) for group in range(len(found))]
        new = self.ask(known, num_new_tokens, call, hit, at_once=at_once)
        known.floor = max(known.floor, start) if known.holds else 0
        known.nulls = nulls if known.holds else known.nulls
        if new is None:
            assert missing > len(free)
            assert known.tables == skipped
            assert self.kept(known) == kept
            return
        assert missing <= len(free)
        assert [len(blocks) for blocks in new] == num_lacking
        assert known.tables == [[*a, *b, *c] for a, b, c in zip(skipped, found, new, strict=True)]
        assert set().union(*new) <= free - set().union(*found)
        for group, blocks in enumerate(new):
            for i, block_id in enumerate(blocks, len(before[group]) + len(found[group])):
                model.give(known, group, i, block_id)
        if hit:
            known.cached = [len(blocks) for blocks in found]
        known.computed = start + num_new_tokens
        if model.config.enable_caching and not call.delay:
            model.cache(known, known.computed)

    def ask(
        self, known: Known, num_new_tokens: int, call: Call, hit: ComputedBlocks | None, *, at_once: bool
    ) -> tuple[Sequence[BlockId], ...] | None:
        request, encoder = known.request, 0 if known.holds else known.num_encoder_tokens
        if not at_once:
            return self.pool.allocate_slots(
                request, num_new_tokens, call.num_lookahead_tokens, hit, num_encoder_tokens=encoder, **call.options
            )  # fmt: skip
        admission = self.pool.admit(
            request, call.max_new_tokens, call.num_lookahead_tokens, num_encoder_tokens=encoder, **call.options
        )  # fmt: skip
        if admission is None:
            return None
        assert (admission.computed, admission.num_new_tokens) == (hit, num_new_tokens)
        return admission.new_blocks

    def unheld(self, *apart: Known) -> set[int]:
        """Returns the blocks that no table holds, except tables of the given requests."""
        held = {b for known in self.requests if known not in apart for table in known.tables for b in table}
        return set(range(1, self.model.config.num_blocks)) - set(self.pool.sink_blocks) - held

    def kept(self, known: Known) -> object:
        """Returns the state that a refusal must not change: everything except the refused request's tables."""
        blocks, request = self.pool.blocks, known.request
        return (
            [blocks.block_hash(BlockId(i)) for i in range(blocks.num_blocks)],
            dict(blocks.prefix_map.pending.steps),
            (repr(self.pool.stats), blocks.num_evicted, self.pool.num_preemptions),
            [repr(other.request) for other in self.requests if other is not known],
            (request.num_computed_tokens, request.num_tokens, request.num_preemptions, list(request.hashes)),
            [table.num_cached for table in request.tables],
        )

    # What holds after every step.

    def check_all(self) -> None:
        self.check_integrity_of_pool()
        self.check_tables()
        self.check_sharing()
        self.check_events()

    def check_integrity_of_pool(self) -> None:
        check_integrity(self.pool, [self.session])
        blocks = self.pool.blocks
        assert set(blocks.free_list) == self.unheld()
        assert len(self.pool.sink_blocks) == self.model.num_sink_blocks
        hashed = [i for i in range(blocks.num_blocks) if blocks.block_hash(BlockId(i)) is not None]
        assert hashed == sorted(self.model.findable)

    def check_tables(self) -> None:
        model = self.model
        for known in self.running():
            assert known.request.num_computed_tokens == known.computed
            for group, table in enumerate(known.tables):
                spec, span = model.specs[group], model.spans[group]
                assert [bool(b) for b in table] == [i >= known.nulls[group] for i in range(len(table))]
                if isinstance(spec, CrossAttentionSpec):
                    continue
                assert all(
                    table[token // span] for token in range(known.computed) if attends(spec, token, known.computed)
                )

    def check_sharing(self) -> None:
        places: dict[int, set[tuple[RequestId, Content]]] = {}
        for known in self.running():
            for group, (span, table) in enumerate(zip(self.model.spans, known.tables, strict=True)):
                for i, block_id in enumerate(table):
                    if block_id:
                        assert self.model.owns_or_shares(known, group, i, block_id)
                        place = known.request.request_id, (group, known.tokens[: (i + 1) * span])
                        assert place not in places.setdefault(block_id, set())
                        places[block_id].add(place)
        for block_id, owners in places.items():
            contents = {content for _, content in owners}
            assert len(contents) == 1, f"block {block_id} is to hold different things"
            group, prefix = contents.pop()
            assert len(owners) == 1 or len(prefix) % self.model.spans[group] == 0

    def check_events(self) -> None:
        model = self.model
        events = self.pool.blocks.take_events()
        self.router.apply(self.parents_first.ordered(events))
        assert not self.router.num_lost
        for event in events:
            match event:
                case BlockStored():
                    assert any(self.describes(event, known) for known in self.requests)
                    self.stored.update((event.group_id, block_hash) for block_hash in event.block_hashes)
                case BlockRemoved():
                    self.stored[event.group_id, event.block_hash] -= 1
                case AllBlocksCleared():
                    self.stored.clear()
        if model.config.enable_events:
            named = ((c[0], each) for c in model.findable.values() for each in model.hash_blocks(c))
            assert +self.stored == Counter(named)

    def describes(self, event: BlockStored, known: Known) -> bool:
        """Whether an event exactly describes a run of this request's blocks."""
        unit, tokens, names = self.model.config.hash_block_size, known.tokens, self.model.hashes(known.tokens)
        if event.block_hashes[-1] not in names:
            return False
        end = names.index(event.block_hashes[-1]) + 1
        start = end - len(event.block_hashes)
        return event == BlockStored(
            tuple(names[start:end]), names[start - 1] if start else None,
            packed_token_ids(tokens[start * unit : end * unit]), unit, None, event.group_id,
        )  # fmt: skip

    def check_routers(self, tokens: Tokens, num_hit_tokens: int) -> None:
        """Routers know the hits of a pool with full attention, also if they begin with a snapshot."""
        if not (self.model.config.enable_events and self.model.config.enable_caching):
            return
        late, cursor = Router(self.model.config.hash_block_size), SnapshotCursor(self.pool)
        parents_first = ParentsFirst()
        while not cursor.is_done:
            late.apply(parents_first.ordered(cursor.next_chunk(3)))
        assert not late.num_lost
        for router in (late, self.router):
            view = PrefixModel(self.model.config)
            places = [(group, key) for key, groups in router.groups.items() for group in groups]
            view.findable = dict(enumerate(places))
            found = view.longest_hit(tokens)
            assert found == num_hit_tokens if self.has_full else found <= num_hit_tokens
            assert router.score(tokens) >= found or not self.has_full

    def end(self) -> None:
        for known in list(self.requests):
            self.free(known)
        self.check_all()
        blocks = self.pool.blocks
        assert blocks.num_free_blocks + self.model.num_sink_blocks + 1 == blocks.num_blocks


Action = Callable[[World], object]


def actions() -> st.SearchStrategy[Action]:
    """Random actions; those that keep requests and caches full are the most frequent."""
    weights: tuple[tuple[int, Callable[..., object], dict[str, st.SearchStrategy[Any]]], ...] = (
        (
            4,
            World.admit_new,
            {"tokens": prompts(), "call": CALLS, "num_encoder_tokens": SMALL, "at_once": st.booleans()},
        ),
        (2, World.admit_waiting, {"which": WHICH, "call": CALLS, "at_once": st.booleans()}),
        (6, World.grow, {"which": WHICH, "call": CALLS, "story": st.integers(0, 1), "count": st.integers(0, 5)}),
        (2, World.reject, {"which": WHICH, "count": SMALL}),
        (1, World.cache, {"which": WHICH, "short": st.just(0) | SMALL}),
        (2, World.free_or_preempt, {"which": WHICH, "forget": st.booleans()}),
        (3, World.serve, {"prompts": st.lists(prompts(), min_size=1, max_size=3), "call": CALLS}),
        (2, World.lookup, {"tokens": prompts(), "step": SMALL}),
        (2, World.evict, {"first": st.integers(0, 40), "stride": st.sampled_from(range(2, 40))}),
        (1, World.reset, {}),
    )
    return st.one_of(
        [st.builds(partial, st.just(method), **options) for weight, method, options in weights for _ in range(weight)]
    )


@settings(max_examples=settings().max_examples * 5)
@given(config=configs(), acts=st.lists(actions(), min_size=10, max_size=40))
def test_any_mix_of_groups_answers_like_the_model(config: PoolConfig, acts: list[Action]) -> None:
    world = World(config)
    for act in acts:
        act(world)
        world.check_all()
    world.end()


@st.composite
def hostile_configs(draw: st.DrawFn) -> PoolConfig:
    """Pools with events whose blocks of full attention are larger than those of other groups."""
    size, times = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 3, 4]))
    has_gaps = specs((size,), 1).filter(lambda spec: not spec.keeps_all)
    others = draw(st.lists(has_gaps, min_size=1, max_size=2))
    config = draw(configs())
    groups = [KVCacheGroup(spec, (f"{i}",)) for i, spec in enumerate([FullAttentionSpec(size * times), *others])]
    config = replace(config, groups=tuple(draw(st.permutations(groups))), enable_caching=True, enable_events=True)
    is_sparse = any(isinstance(spec, SPARSE_KINDS) for spec in others) and draw(st.booleans())
    tokens = 0 if is_sparse else None
    return replace(config, dcp_world_size=1, retention_tokens=tokens)


@given(config=hostile_configs(), acts=st.lists(actions(), min_size=10, max_size=20))
def test_routers_score_as_pools_hit_where_full_attention_has_the_larger_blocks(
    config: PoolConfig, acts: list[Action]
) -> None:
    world = World(config)
    for act in acts:
        act(world)
        world.check_all()
        for known in world.requests[-2:]:
            world.lookup(known.prompt, 5)
        world.lookup(story_tokens(0, 0, MAX_TOKENS), 7)
