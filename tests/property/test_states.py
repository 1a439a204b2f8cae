"""Blocks of states under arbitrary schedules: each is found only as the state that was written to it last.

Steps end anywhere: at chunks of any length, at cuts by the service, at accepted and rejected drafts. A kernel that
writes as vLLM's does keeps the tokens after which each block was written. After each step, every hash must lead to a
block with the state after exactly its tokens. Every step must have continued from the state after the tokens before it.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from kvpool.core.ids import BlockId, GroupId, RequestNumber
from kvpool.core.pools.snapshots import pool_snapshot, restored_pool
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import World
from support.integrity import check_integrity

SEEDS: Final = 30
_STEPS: Final = 120
_UNIT: Final = 4
_MAX_TOKENS: Final = 200

Tokens = tuple[int, ...]
SHAPES: Final[dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]]] = {
    "states": ((4,), {}, {}),
    "larger_states": ((8,), {}, {}),
    "states_of_two_sizes": ((4, 8), {}, {}),
    "drafts": ((8,), {"num_speculative_blocks": 3}, {}),
    "eagle": ((8,), {"num_speculative_blocks": 2}, {"use_eagle": True}),
    "exported": ((8,), {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 4}, {}),
    "exported_of_two_sizes": ((4, 8), {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 4}, {}),
    "partial": ((16,), {}, {"partial_hits": True}),
    "partial_drafts": ((16, 8), {"num_speculative_blocks": 2}, {"partial_hits": True}),
    "partial_exported": (
        (16,),
        {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 4},
        {"partial_hits": True},
    ),
}
"""Blocks of the groups of states in tokens, fields of their specs, and options of the pool."""


@dataclass(slots=True, eq=False)
class Known:
    """A request as its scheduler and the kernel know it.

    Attributes:
        tokens: The tokens that the pool knows.
        sampled: Tokens that the next operation appends.
        num_rejected: Drafts that the next operation rejects.
        is_delayed: Whether its full blocks wait for CACHE.
        written: For each group of states the block that a step has written the state after the accepted tokens to.
    """

    number: int
    session: Session
    tokens: Tokens = ()
    sampled: Tokens = ()
    num_rejected: int = 0
    is_delayed: bool = False
    written: dict[GroupId, BlockId] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        return self.session.by_number[RequestNumber(self.number)]

    @property
    def num_computed_tokens(self) -> int:
        return self.request.num_computed_tokens if RequestNumber(self.number) in self.session.by_number else 0


class Schedule:
    """A schedule of two sessions, drawn from a seed, and the memory that its steps write."""

    def __init__(self, shape: str, seed: int) -> None:
        self.random = random.Random(f"{shape}{seed}")  # noqa: S311 - drawn again from the same seed
        spans, spec, options = SHAPES[shape]
        specs = [FullAttentionSpec(_UNIT), *(MambaSpec(span, only_step_ends=True, **spec) for span in spans)]
        retention = self.random.choice([None, 0, 1, 2])
        aligned = max(spans)
        if options.get("partial_hits"):
            options = {**options, "prefix_match_unit": _UNIT}
        elif retention is None and aligned > _UNIT:
            retention = 1
        retention_tokens = None if retention is None else retention * aligned
        self.world = World(self.random.choice([60, 120]), specs=specs, retention_tokens=retention_tokens, **options)
        self.spans = {GroupId(i): span for i, span in enumerate(spans, 1)}
        self.num_drafts = spec.get("num_speculative_blocks", 0)
        self.export_tokens = spec.get("prefill_checkpoint_alignment", 0)
        self.sessions = [self.world.open(), self.world.open()]
        self.memory: dict[BlockId, tuple[GroupId, Tokens]] = {}
        self.prefixes: dict[bytes, Tokens] = {}
        self.families = [self.draw(_MAX_TOKENS) for _ in range(3)]
        self.waiting: list[Known] = []
        self.running: list[Known] = []
        self.count = self.num_hits = 0

    def draw(self, count: int) -> Tokens:
        return tuple(self.random.randrange(256) for _ in range(count))

    def run(self) -> None:
        actions = (self.arrive, self.admit, self.go_on, self.cache, self.preempt, self.finish)
        for _ in range(_STEPS):
            self.random.choices(actions, (4, 6, 20, 2, 1, 2))[0]()
            self.check()
        check_integrity(self.world.pool, self.world.sessions())
        restored = restored_pool(pool_snapshot(self.world.pool), None)
        self.world.pool.blocks.end_snapshot()
        for session in self.sessions:
            for request in session.requests.values():
                assert restored.sessions[session.session_number].requests[request.request_id].tables == request.tables

    def check(self) -> None:
        """Every hash of a state leads to a block that holds it."""
        for group_id, block_hash, block_id in self.world.pool.blocks.prefix_map.entries():
            if group_id in self.spans:
                assert self.memory.get(block_id) == (group_id, self.prefixes[block_hash]), block_id

    def arrive(self) -> None:
        family = self.random.choice(self.families)
        prompt = family[: self.random.randrange(1, 90)] + self.draw(self.random.choice([0, 0, 1, 5, 20]))
        self.count += 1
        self.waiting.append(Known(self.count, self.random.choice(self.sessions), sampled=prompt))

    def admit(self) -> None:
        """Admits up to two requests, with chunks of any length or with a budget that the service cuts the last to."""
        session = self.random.choice(self.sessions)
        known = [each for each in self.waiting if each.session is session][:2]
        if not known or len(self.running) > 6:
            return
        budget = self.random.choice([0, self.random.randrange(1, 100)])
        alignment = self.world.pool.config.hit_alignment
        most = [self.random.choice([0, self.random.randrange(1, 60), alignment * 3, alignment * 8]) for _ in known]
        result = self.step(session, Operation.ADMIT, known, num_new_tokens=most, admission_budget_tokens=budget)
        for i, each in enumerate(known):
            if not result.outcomes or not result.outcomes[i]:
                self.waiting.remove(each)
                self.running.append(each)
                self.num_hits += bool(result.num_hit_tokens and result.num_hit_tokens[i])

    def go_on(self) -> None:
        """The next chunk of a prompt, of any length, or a decode with drafts."""
        if not self.running:
            return
        each = self.random.choice(self.running)
        start = each.num_computed_tokens - each.num_rejected
        left = len(each.tokens) + len(each.sampled) - start
        if start + left + self.num_drafts + 2 > _MAX_TOKENS:
            self.free(each)
            return
        to_last_hit = (start + left - 1) // self.world.pool.config.hit_alignment * self.world.pool.config.hit_alignment
        count = self.random.choice([left, self.random.randrange(1, left + 1), max(to_last_hit - start, 1)])
        if left == 1:
            count += self.random.randrange(self.num_drafts + 1)
        delays = self.random.random() < 0.1
        in_flight = self.random.choice([0, 0, 6, 40])
        options = {"delay_cache_blocks": [delays], "num_in_flight_tokens": [in_flight]}
        result = self.step(each.session, Operation.ALLOCATE, [each], num_new_tokens=[count], **options)
        each.is_delayed |= delays
        if result.outcomes and result.outcomes[0]:
            self.preempt()

    def cache(self) -> None:
        for each in self.running:
            if each.is_delayed:
                count = each.num_computed_tokens - each.num_rejected
                each.is_delayed = False
                self.step(each.session, Operation.CACHE, [each], num_new_tokens=[count])
                return

    def preempt(self) -> None:
        if self.running:
            each = self.running.pop(self.random.randrange(len(self.running)))
            self.world.run(each.session, Operation.PREEMPT, request_numbers=[each.number])
            each.num_rejected, each.is_delayed = 0, False
            each.written.clear()
            self.waiting.insert(0, each)

    def finish(self) -> None:
        if self.running:
            self.free(self.random.choice(self.running))

    def free(self, each: Known) -> None:
        self.running.remove(each)
        self.world.free(each.session, each.number)
        if self.random.random() < 0.5:
            self.families[self.random.randrange(len(self.families))] = each.tokens + self.draw(_MAX_TOKENS)

    def step(self, session: Session, operation: Operation, known: Sequence[Known], **columns: Any) -> StepResult:
        """Applies a step of one operation on each of these requests, and executes what it allocates."""
        num_hashes, joined = self.world.pool.config.num_hashes, b""
        new = [f"r{each.number}" for each in known if RequestNumber(each.number) not in session.by_number]
        for each in known:
            tokens = each.tokens + each.sampled
            for i in range(num_hashes(len(each.tokens)), num_hashes(len(tokens))):
                prefix = tokens[: (i + 1) * _UNIT]
                block_hash = hashlib.sha256(bytes(prefix)).digest()
                self.prefixes[block_hash] = prefix
                joined += block_hash
        before = [each.num_computed_tokens - each.num_rejected for each in known]
        result = self.world.run(
            session,
            *[operation] * len(known),
            executed=self.random.choice([0, session.sequence]),
            request_numbers=[each.number for each in known],
            num_appended_tokens=[len(each.sampled) for each in known],
            num_rejected_tokens=[each.num_rejected for each in known],
            block_hashes=joined,
            request_ids=new,
            **columns,
        )
        for each in known:
            each.tokens, each.sampled, each.num_rejected = each.tokens + each.sampled, (), 0
        if operation is not Operation.CACHE:
            done = [not result.outcomes or result.outcomes[i] == Outcome.OK for i in range(len(known))]
            hits = result.num_hit_tokens or [0] * len(known)
            starts = [start + hit for start, hit in zip(before, hits, strict=True)]
            self.execute([(each, starts[i]) for i, each in enumerate(known) if done[i]], result.copied_block_ids)
        return result

    def execute(self, allocated: Sequence[tuple[Known, int]], copied: Sequence[int]) -> None:
        """Makes the copies, checks the states that requests continue from, then writes the states after them."""
        for source, target in zip(copied[1::3], copied[2::3], strict=True):
            self.memory[BlockId(target)] = self.memory[BlockId(source)]
        for each, start in allocated:
            for group_id, span in self.spans.items() if start else ():
                table = each.request.tables[group_id].block_ids
                block_id = each.written.get(group_id) or table[(start - 1) // span]  # of a hit
                assert self.memory[block_id] == (group_id, each.tokens[:start])
        for each, start in allocated:
            end = each.request.num_computed_tokens
            drafts = self.draw(max(end - len(each.tokens), 0))
            num_accepted = self.random.randint(0, len(drafts))
            for group_id, span in self.spans.items():
                self.write(each, group_id, span, start, drafts, num_accepted)
            if end >= len(each.tokens):
                each.sampled = drafts[:num_accepted] + self.draw(1)
            each.num_rejected = len(drafts) - num_accepted

    def write(  # noqa: PLR0913, PLR0917 - a step of a kernel
        self, each: Known, group_id: GroupId, span: int, start: int, drafts: Tokens, num_accepted: int
    ) -> None:
        """Writes the states of one step in one group, as vLLM's kernels do."""
        table, tokens = each.request.tables[group_id].block_ids, each.tokens + drafts
        end = each.request.num_computed_tokens
        num_run, at = end - len(drafts), (end - 1) // span
        for i in range(len(drafts) + 1):
            self.memory[table[at + i]] = (group_id, tokens[: num_run + i])
        each.written[group_id] = table[at + num_accepted]
        boundary = (num_run + num_accepted) // span * span
        if boundary >= num_run and (block_id := table[boundary // span - 1]):  # accepted drafts reach or pass it
            self.memory[block_id] = (group_id, tokens[:boundary])
        alignment = self.world.pool.config.hit_alignment
        exported = (end - 1) // alignment * alignment
        if (
            self.export_tokens
            and not drafts
            and at - 1 > (start - 1) // span
            and table[at - 1]
            and start % _UNIT == (exported - start) % self.export_tokens == 0
        ):
            self.memory[table[at - 1]] = (group_id, tokens[:exported])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_is_found_only_after_the_tokens_after_which_it_was_written(shape: str) -> None:
    num_hits = 0
    for seed in range(SEEDS):
        schedule = Schedule(shape, seed)
        try:
            schedule.run()
        except AssertionError as error:
            error.add_note(f"seed {seed} of {shape}")
            raise
        num_hits += schedule.num_hits
    assert num_hits > SEEDS
