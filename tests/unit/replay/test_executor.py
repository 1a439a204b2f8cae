"""Executors read only computed tokens, checked by an executor that records the contents of every slot.

Before each round it checks every token that a request reads.
"""

import random
from collections.abc import Iterable, Sequence

import pytest

from kvpool.client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    PoolConfig,
    Request,
    SlidingWindowSpec,
    connect,
)
from kvpool.core.ids import PoolName
from kvpool.replay.executor import NoModel, Scheduled
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import Work

FULL = FullAttentionSpec(4)
MIXES: dict[str, list[KVCacheSpec]] = {
    "full": [FULL],
    "windows": [FULL, SlidingWindowSpec(4, sliding_window=10)],
    "chunks": [ChunkedLocalAttentionSpec(4, attention_chunk_size=8), FULL],
    "sizes": [FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=9)],
}


def next_token(tokens: Sequence[int]) -> int:
    return random.Random(repr(tokens)).randrange(5)  # noqa: S311 - any function of the tokens


class Bookkeeper:
    """Records the contents of each slot: the tokens up to its own, and the group."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.specs = specs
        self.slots: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.rounds: list[tuple[list[str], list[str]]] = []

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> list[int]:
        self.rounds.append(([s.request.request_id for s in scheduled], [r.request_id for r in released]))
        tokens = []
        for entry in scheduled:
            request, end = entry.request, entry.request.num_computed_tokens
            for group, spec in enumerate(self.specs):
                for position in range(entry.num_executed_tokens, end):
                    self.slots[self.slot(request, group, position)] = (group, tuple(request.token_ids[: position + 1]))
                for position in range(spec.num_skipped_tokens(entry.num_executed_tokens), end):
                    held = self.slots.get(self.slot(request, group, position))
                    assert held == (group, tuple(request.token_ids[: position + 1])), (request, group, position)
            if entry.yields_token:
                tokens.append(next_token(request.token_ids))
        return tokens

    def slot(self, request: Request, group: int, position: int) -> tuple[int, int]:
        size = self.specs[group].block_size
        block_id = request.block_ids[group][position // size]
        assert block_id, "the null block is written or read"
        return block_id, position % size


class Works:
    def __init__(self, *works: Work) -> None:
        self.works = works
        self.outputs: dict[str, list[int]] = {}

    def start(self) -> list[Work]:
        return list(self.works)

    def follow_up(self, done: Work, output: list[int]) -> None:
        self.outputs[done.work_id] = list(output)


def play(
    specs: Sequence[KVCacheSpec], num_blocks: int, works: Works, most_tokens: int = 8
) -> tuple[Counts, Bookkeeper]:
    executor = Bookkeeper(specs)
    with connect("embedded:") as client:
        groups = tuple(map(KVCacheGroup, specs))
        client.create_pool(PoolConfig(PoolName("p"), num_blocks, 256, groups, allow_too_few_blocks=True))
        with client.open_session("p") as session:
            scheduler = Scheduler(session, works, max_num_seqs=4, max_num_batched_tokens=most_tokens, executor=executor)
            counts = scheduler.run()
    return counts, executor


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(8))
def test_executors_read_only_computed_tokens(mix: str, seed: int) -> None:
    source = random.Random(seed)  # noqa: S311 - a workload
    prefix = [source.randrange(5) for _ in range(16)]
    works = Works(
        *(
            Work(f"r{i}", prefix[: source.randint(1, 16)] + greedy(prefix, source.randint(0, 6)), source.randint(4, 16))
            for i in range(14)
        )
    )
    blocks = {"full": 13, "windows": 24, "chunks": 18, "sizes": 17}[mix]
    counts, executor = play(MIXES[mix], blocks, works)
    assert counts.preemptions > 0
    assert counts.hit_tokens > 0
    assert works.outputs == {work.work_id: greedy(work.token_ids, work.output_length) for work in works.works}
    assert sum(len(released) for _, released in executor.rounds) == counts.requests + counts.preemptions


def test_a_preempted_request_got_no_slots_in_the_same_round() -> None:
    """In one round `a` finds no block, while `b` after it could fill its last block without a new one.

    If it did, and was preempted then, `c` would hit blocks that nothing computed.
    """
    prompt = [0, 1, 2, 3, 4, 0, 1]
    works = Works(
        Work("short0", [2], 2),  # these two leave blocks without hashes, which are reused first
        Work("short1", [4], 2),
        Work("a", [3, 3, 3, 3], 2),
        Work("b", prompt, 2),
        Work("c", [*prompt, *greedy(prompt, 1), 2], 1),
    )
    specs = [FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=100)]
    counts, executor = play(specs, 10, works, most_tokens=64)
    assert executor.rounds[1] == (["short0", "short1", "a"], ["b"])
    assert executor.rounds[2][0] == ["b", "c"]
    assert counts.hit_tokens == 8  # c hits all blocks that b filled


def test_no_model_gives_different_requests_different_tokens() -> None:
    with connect("embedded:") as client:
        client.create_pool(PoolConfig(PoolName("p"), 10, 32, (KVCacheGroup(FULL),)))
        with client.open_session("p") as session:
            requests = [session.request(f"r{i}", [i] * 5) for i in range(3)]
            for request in requests:
                assert session.admit(request, 3 if request is requests[1] else 0)
            tokens = NoModel().execute([Scheduled(request) for request in requests], [])
    assert len(set(tokens)) == len(tokens) == 2  # the second still has tokens to compute
