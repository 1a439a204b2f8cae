"""A session that answers decodes on credit, compared with a pool that gets every operation.

After each round both pools must be equal: tables, computed tokens, the order of the free list, the cached blocks and
the order of their copies. Blocks that the session filled and reports with its next step are excepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client import Answer, Decodes, FullAttentionSpec, KVCacheGroup, Outcome, PoolConfig, Request, StepBuilder
from kvpool.client import Session as ClientSession
from kvpool.client.blocking import run
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.client.transports.transport import SessionOptions
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.blocks.quota import NO_QUOTA
from kvpool.core.ids import BlockId, PoolName, RequestNumber, SessionId
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import CrossAttentionSpec
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from kvpool.core.steps.columns import Operation, Step
from property.mixes import MAX_TOKENS, configs, specs
from support.integrity import check_integrity
from support.state import DrivenState

MAX_REQUESTS = 6
NO_HIT: Final[Mapping[str, object]] = {}


@dataclass(frozen=True, slots=True)
class Round:
    """One action of a scheduler.

    Attributes:
        kind: Kind of the action, see `Both.play`.
        which: Selects a request.
        count: Number of tokens.
        num_lookahead_tokens: Number of lookahead tokens.
        appends: Whether the tokens are already known, or are appended later.
        options: Allocation options; external tokens only for requests without blocks, in rounds of their own kind.
    """

    kind: str
    which: int
    count: int
    num_lookahead_tokens: int
    appends: bool
    options: AllocationOptions = DEFAULT_OPTIONS


KINDS = (
    "admit",
    "admit",
    "external",
    *("batch",) * 6,
    *("allocate",) * 4,
    "mixed",
    "reject",
    "preempt",
    "free",
    "executed",
    "reset",
)
ROUNDS = st.builds(
    Round,
    st.sampled_from(KINDS),
    st.integers(0, 7),
    st.integers(1, 3),
    st.sampled_from([0, 0, 0, 1, 4]),
    st.sampled_from([True, True, True, False]),
    st.one_of(
        st.just(DEFAULT_OPTIONS),
        st.builds(
            AllocationOptions,
            num_external_tokens=st.integers(1, 20),
            num_in_flight_tokens=st.sampled_from([0, 1, 4, 9, 40]),
            num_reserved_blocks=st.sampled_from([0, 0, 2, 15]),
            num_watermark_blocks=st.sampled_from([0, 0, 3]),
        ),
    ),
)

ROUNDS_BESIDE = st.builds(
    Round,
    st.sampled_from(("admit", "batch", *("mixed",) * 4, "free", "executed")),
    st.integers(0, 7),
    st.integers(1, 3),
    st.just(0),
    st.just(True),  # noqa: FBT003 - it appends
)


@st.composite
def wide_configs(draw: st.DrawFn) -> PoolConfig:
    """Configurations with several tokens per block, so that most blocks have free slots."""
    caching = draw(st.sampled_from([True, True, False]))
    config = replace(draw(configs()), enable_caching=caching, retention_tokens=None)
    mix = draw(st.lists(specs(draw(st.sampled_from([(8,), (4,), (4, 8), (3, 6)])), 1), min_size=1, max_size=3))
    if not config.enable_caching and draw(st.booleans()):
        mix.append(CrossAttentionSpec(4))
    groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(mix))
    num_blocks = draw(st.sampled_from([24, 40, 80]))
    return replace(config, groups=groups, num_blocks=num_blocks, dcp_world_size=1, enable_events=False)


def running_options(each: Round) -> AllocationOptions:
    """The options of a round, as allowed for a request with blocks."""
    return replace(each.options, num_external_tokens=0)


class OpenTransport(EmbeddedTransport):
    """Gives a test access to the pool and the session."""

    def behind(self, session_id: str) -> tuple[KVCacheManager, Session]:
        return self._state.sessions.find(session_id, 0.0)


class Asked:
    """The pool that gets every operation, one per step, without the fast loop for plain rows."""

    def __init__(self, config: PoolConfig) -> None:
        self._allocator = DrivenState()
        self.pool = self._allocator.create_pool(config, config.hash_scheme.none_hash)[0]
        self.pool.plain_manager = None
        _, self.session = self._allocator.open_session(
            config.name, "", 10.0, session_id=SessionId("s"), now_seconds=0.0, quota=NO_QUOTA
        )
        self._known: dict[int, tuple[int, int]] = {}

    def ask(
        self,
        operation: Operation,
        request: Request | None = None,
        new: int = 0,
        hit: Mapping[str, object] = NO_HIT,
        **columns: int,
    ) -> Outcome:
        """Sends an operation with the appended tokens of the request, and with all credits set to zero."""
        number = request.number if request else 0
        step = Step(self.session.sequence + 1, operations=[operation], request_numbers=[number], num_new_tokens=[new])
        for name, value in columns.items():
            setattr(step, name, [value])
        for name, values in hit.items():
            setattr(step, name, values)
        if request:
            num_tokens, num_hashes = self._known.get(number, (0, 0))
            step.num_appended_tokens = [request.num_tokens - num_tokens]
            step.block_hashes = b"".join(request.hashes[num_hashes:])
            if request.number not in self.session.by_number:
                step.declares, step.request_ids = [True], [request.request_id]
            self._known[number] = (request.num_tokens, len(request.hashes))
        for known in self.session.requests.values():
            known.credit_tokens = 0
        result = self._allocator.apply(self.pool, self.session, step)
        return Outcome(result.outcomes[0] if result.outcomes else 0)

    def promise(self, request: Request) -> dict[str, object]:
        """The current hit of a request, as columns of a step that allocates it."""
        known = self.session.by_number[RequestNumber(request.number)]
        hit = self.pool.find_longest_cache_hit(known)
        if not hit.num_tokens:
            return {}
        ids = [block_id for of_group in hit.block_ids for block_id in of_group]
        return {"num_block_ids": [len(of_group) for of_group in hit.block_ids], "block_ids": ids}

    def mark_executed(self) -> None:
        self._allocator.mark_executed(self.pool, self.session, self.session.sequence)


class Both:
    """Plays the rounds of one scheduler to a client session and to `Asked`."""

    def __init__(self, config: PoolConfig) -> None:
        self.transport = OpenTransport()
        run(self.transport.create_pool(config))
        opened = run(self.transport.open_session(SessionOptions(config.name)))
        self.session = ClientSession(opened)
        self.asked = Asked(opened.config)
        self.num_encoder_tokens = 5 if any(isinstance(g.spec, CrossAttentionSpec) for g in config.groups) else 0
        self.requests: list[Request] = []
        self.num_made = 0

    def play(self, each: Round) -> None:
        running = [request for request in self.requests if request.num_computed_tokens]
        if each.kind in ("admit", "external"):
            self.admit(each)
        elif each.kind == "reset":
            assert self.session.reset_prefix_cache() == (self.asked.ask(Operation.RESET) is Outcome.OK)
        elif each.kind == "executed":
            self.session.mark_executed()
            self.asked.mark_executed()
        elif running and each.kind == "batch":
            self.decode(running, each)
        elif running:
            picked = running[each.which % len(running)]
            match each.kind:
                case "mixed":
                    self.mixed(running, picked, each)
                case "allocate":
                    self.allocate(picked, each)
                case "reject":
                    self.reject(picked, each)
                case _:
                    self.leave(picked, each)

    def admit(self, each: Round) -> None:
        waiting = [request for request in self.requests if not request.num_computed_tokens]
        if waiting and each.which % 2:
            request = waiting[each.which % len(waiting)]
        elif len(self.requests) < MAX_REQUESTS:
            prompt = [i % 5 * (each.which % 3) for i in range(1 + 7 * each.which // 2 + each.count)]
            prompt[0] = self.num_made + 1 if each.count > 1 else 0  # unique, or shared with others
            request = self.declare(prompt)
        else:
            return
        if each.kind == "external":
            self.bring(request, each)
            return
        counts: dict[str, Any] = {
            "num_lookahead_tokens": each.num_lookahead_tokens,
            "num_encoder_tokens": self.num_encoder_tokens,
        }
        with self.session.step() as step:
            answer = step.admit(request, **counts)
        assert answer.outcome is self.asked.ask(Operation.ADMIT, request, **counts)

    def bring(self, request: Request, each: Round) -> None:
        """Looks up a request, then allocates its external tokens, and none or some of the other tokens."""
        with self.session.step() as step:
            found = step.get_computed_blocks(request)
        promise = self.asked.promise(request)
        left = request.num_tokens - found.num_hit_tokens
        options = replace(each.options, num_external_tokens=min(each.options.num_external_tokens, left))
        new = min(each.count, left - options.num_external_tokens)
        if not options.num_external_tokens and not new:
            return
        ids = tuple([BlockId(block_id) for block_id in of_group] for of_group in found.hit_blocks)
        with self.session.step() as step:
            answer = step.allocate_slots(
                request,
                new,
                computed=ComputedBlocks(ids, found.num_hit_tokens) if found.num_hit_tokens else None,
                num_encoder_tokens=self.num_encoder_tokens,
                options=options,
            )
        columns = {**asdict(options), "num_encoder_tokens": self.num_encoder_tokens}
        assert answer.outcome is self.asked.ask(Operation.ALLOCATE, request, new, promise, **columns)

    def decode(self, requests: Sequence[Request], each: Round) -> None:
        requests = [r for r in requests if max(r.num_tokens, r.num_computed_tokens) < MAX_TOKENS]
        with self.session.step() as step:
            decodes = step.decode(
                requests,
                [each.which] * len(requests) if each.appends else None,
                num_lookahead_tokens=each.num_lookahead_tokens,
            )
        self.check_decodes(requests, decodes, each)

    def check_decodes(self, requests: Sequence[Request], decodes: Decodes, each: Round) -> None:
        for i, request in enumerate(requests):
            self.repeat_allocation(request, 1, decodes.refused.get(i, Outcome.OK), each)

    def mixed(self, running: Sequence[Request], left: Request, each: Round) -> None:
        """Requests decode, one allocates, one is preempted, and one may be admitted, all in one step.

        A lack of blocks stops none of the decodes.
        """
        requests = [r for r in running if r is not left and max(r.num_tokens, r.num_computed_tokens) < MAX_TOKENS - 3]
        alone, batch = requests[:1], requests[1:]
        coming = self.newcomer(running, each)
        with self.session.step() as step:
            token_ids = [each.which] * len(batch) if each.appends else None
            decodes = step.decode(batch, token_ids, num_lookahead_tokens=each.num_lookahead_tokens)
            answers = [self.allocate_in(step, request, each) for request in alone]
            step.preempt(left)
            admitted = step.admit(coming) if coming else None
        self.check_decodes(batch, decodes, each)
        for request, answer in zip(alone, answers, strict=True):
            self.repeat_allocation(request, each.count, answer.outcome, each, running_options(each))
        self.asked.ask(Operation.PREEMPT, left)
        if coming and admitted and admitted.outcome is not Outcome.SKIPPED:
            assert admitted.outcome is self.asked.ask(Operation.ADMIT, coming)

    def newcomer(self, running: Sequence[Request], each: Round) -> Request | None:
        """A request to admit beside decodes: a waiting one, one similar to a running one, or None."""
        waiting = [request for request in self.requests if not request.num_computed_tokens]
        if self.num_encoder_tokens or each.which < 3:
            return None
        if waiting or len(self.requests) >= MAX_REQUESTS:
            return waiting[0] if waiting else None
        like = running[each.count % len(running)].token_ids[: MAX_TOKENS - 3]
        return self.declare([*like, each.which, 1] if each.which % 2 else [*like[1:], 2])

    def declare(self, prompt: list[int]) -> Request:
        self.num_made += 1
        request = self.session.request(f"r{self.num_made}", prompt)
        self.requests.append(request)
        self.asked.ask(Operation.APPEND, request)
        return request

    def allocate(self, request: Request, each: Round) -> None:
        if max(request.num_tokens, request.num_computed_tokens) + each.count > MAX_TOKENS:
            return
        if each.appends:
            request.append([each.which] * each.count)
        with self.session.step() as step:
            answer = self.allocate_in(step, request, each)
        self.repeat_allocation(request, each.count, answer.outcome, each, running_options(each))

    @staticmethod
    def allocate_in(step: StepBuilder, request: Request, each: Round) -> Answer:
        options = running_options(each)
        return step.allocate_slots(request, each.count, num_lookahead_tokens=each.num_lookahead_tokens, options=options)

    def reject(self, request: Request, each: Round) -> None:
        """Rejects allocated draft tokens, which were never known and so are not cached."""
        kept = request.num_computed_tokens - min(each.count, 3)
        known = self.asked.session.by_number[RequestNumber(request.number)]
        if kept < 1 or not self.asked.pool.can_reject(known, kept):
            return
        rejected = request.num_computed_tokens - kept
        with self.session.step() as step:
            answer = step.allocate_slots(request, 1, num_computed_tokens=kept)
        assert answer.outcome is self.asked.ask(Operation.ALLOCATE, request, 1, num_rejected_tokens=rejected)

    def leave(self, request: Request, each: Round) -> None:
        if each.kind == "free":
            self.session.free(request)
            self.requests.remove(request)
            self.asked.ask(Operation.FREE, request)
        else:
            self.session.preempt(request)
            self.asked.ask(Operation.PREEMPT, request)

    def repeat_allocation(
        self,
        request: Request,
        count: int,
        outcome: Outcome | None,
        each: Round,
        options: AllocationOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Repeats an allocation that the session answered with `outcome`, unless it was skipped."""
        if outcome is not Outcome.SKIPPED:
            columns = {"num_lookahead_tokens": each.num_lookahead_tokens, **asdict(options)}
            assert self.asked.ask(Operation.ALLOCATE, request, count, **columns) is outcome

    def check(self) -> None:
        pool, session = self.transport.behind(self.session.session_id)
        check_integrity(pool, [session])
        check_integrity(self.asked.pool, [self.asked.session])
        blocks, wanted = pool.blocks, self.asked.pool.blocks
        assert list(blocks.free_list) == list(wanted.free_list)
        for block_id in map(BlockId, range(blocks.num_blocks)):
            assert blocks.ref_cnt(block_id) == wanted.ref_cnt(block_id)
            assert blocks.block_hash(block_id) == wanted.block_hash(block_id)
        assert blocks.prefix_map.pending.steps.keys() == wanted.prefix_map.pending.steps.keys()
        assert list(blocks.prefix_map.entries()) == list(wanted.prefix_map.entries())
        for request in self.requests:
            known = self.asked.session.by_number[RequestNumber(request.number)]
            assert request.num_computed_tokens == known.num_computed_tokens
            assert request.block_ids == [table.block_ids for table in known.tables]
            behind = session.by_number.get(RequestNumber(request.number))  # None if it was never admitted
            if behind:
                assert request.block_ids == [table.block_ids for table in behind.tables]
                assert request.credit_tokens == (behind.credit_tokens if pool.gives_credit else 0)


def check_rounds(config: PoolConfig, num_requests: int, rounds: list[Round]) -> None:
    """Plays rounds after some admissions; compares both pools after each of them."""
    both = Both(config)
    for request in range(num_requests):
        both.play(Round("admit", 2 * request, 2, 0, appends=True))
    for each in rounds:
        both.play(each)
        both.check()


@settings(max_examples=settings().max_examples * 6 // 10)
@given(config=wide_configs(), rounds=st.lists(ROUNDS, min_size=25, max_size=60))
def test_answers_on_credit_equal_the_answers_of_the_pool(config: PoolConfig, rounds: list[Round]) -> None:
    check_rounds(config, 3, rounds)


@given(order=st.sampled_from(ReuseOrder), rounds=st.lists(ROUNDS_BESIDE, min_size=25, max_size=60))
def test_decodes_beside_admissions_equal_the_answers_of_the_pool(order: ReuseOrder, rounds: list[Round]) -> None:
    """In these rounds the order of caching often matters."""
    groups = (KVCacheGroup(FullAttentionSpec(4), ("layer.0",)),)
    check_rounds(PoolConfig(PoolName("m"), 60, MAX_TOKENS, groups, reuse_order=order), 4, rounds)
