"""Real engines over two tiers: the tokens of vLLM alone, in a first tier of a tenth of what all requests need."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.load import Load, Revisits, answer_at_once_as_vllm_alone, hit_rate
from engine.models import GEMMA, LFM2, LLAMA
from engine.serving import AHEAD, BESIDE, Site, site
from kvpool.client import connect
from support.waiting import wait_until

HOST_MEMORY = ("--host-memory", "256MiB")
ALL_BLOCKS = 1500
WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """An engine.

    Attributes:
        model: config.json.
        num_blocks: Of the first tier.
        chats: What it is asked.
        options: More arguments of `vllm.LLM`.
        num_ranks: Number of its ranks.
        settings: Settings of kvpool.
    """

    model: Any
    num_blocks: int
    chats: Revisits
    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


ONE_AT_A_TIME = {"max_num_batched_tokens": 32, "max_num_seqs": 1}
"""Each step ends where a block does, so that the size of batches, on which states depend, does not depend on hits."""
LATE = {"worker_cls": "engine.late_copies.LateWorker"}
CASES = {
    "llama": Case(LLAMA, 80, Revisits(48, num_at_once=4)),
    "llama-ahead": Case(LLAMA, 80, Revisits(48, num_at_once=4), AHEAD),
    "gemma": Case(GEMMA, 250, Revisits(24, num_at_once=2)),
    "llama-beside": Case(LLAMA, 80, Revisits(48, num_at_once=4), settings=BESIDE),
    "llama-ahead-beside": Case(LLAMA, 80, Revisits(48, num_at_once=4), AHEAD, settings=BESIDE),
    "lfm2": Case(LFM2, 60, Revisits(24, num_at_once=1), ONE_AT_A_TIME),
    "tensor": Case(LLAMA, 80, Revisits(24, num_at_once=4), {"tensor_parallel_size": 2}, 2),
    "pipeline": Case(LLAMA, 80, Revisits(24, num_at_once=4), {"pipeline_parallel_size": 2}, 2),
    "tensor-beside": Case(LLAMA, 80, Revisits(24, num_at_once=4), {"tensor_parallel_size": 2}, 2, BESIDE),
    "pipeline-beside": Case(LLAMA, 80, Revisits(24, num_at_once=4), {"pipeline_parallel_size": 2}, 2, BESIDE),
}
COMPLETE = ("llama-ahead", "llama-beside", "gemma", "tensor", "pipeline", "tensor-beside", "pipeline-beside")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.complete] if each in COMPLETE else []) for each in CASES]
)
def test_every_token_is_that_of_vllm_alone_with_memory_for_all(name: str, address: str) -> None:
    case = CASES[name]
    with ExitStack() as stack:
        place = stack.enter_context(
            site(address, case.num_blocks, f"host-{name}", case.num_ranks, model=case.model, lender_flags=HOST_MEMORY)
        )
        alone = place.engine(is_attached=False, num_blocks=ALL_BLOCKS, options=case.options)
        expected = case.chats.run(alone)
        alone.stop()
        engine = place.engine(options=case.options | (LATE if case.settings else {}), **case.settings)
        if case.settings:  # beside a request that runs all the time
            engine.ask("long", range(3, 20), 1000)
        found = case.chats.run(engine)
        engine.stop()
        assert not case.settings or "copies are made late" in engine.wait_for_end()
        with connect(address) as client:
            pool = client.get_pool(place.pool)
    assert [[each.tokens for each in turn] for turn in found] == [[each.tokens for each in turn] for turn in expected]
    assert pool.prefix_cache.host_hits_tokens > pool.prefix_cache.hits_tokens / 3
    for turn, answers in enumerate(found[1:], 1):
        assert hit_rate(answers) > hit_rate(expected[turn]) / 2
    assert pool.host_memory.used_blocks == 0


@pytest.fixture
def place(address: str, tmp_path: Path) -> Iterator[Site]:
    with site(address, 120, tmp_path.name, lender_flags=HOST_MEMORY) as started:
        yield started


def test_two_engines_that_schedule_ahead_share_both_tiers(place: Site) -> None:
    """With preemptions and aborts, steps of both engines are in flight, and blocks change hands."""
    answer_at_once_as_vllm_alone(place, AHEAD, [Load(name, 60) for name in "ab"])
    with connect(place.service) as client:

        def is_quiet() -> bool:
            pool = client.get_pool(place.pool)
            return pool.free_blocks == place.num_blocks - 1 and not pool.host_memory.used_blocks

        wait_until(is_quiet, "all blocks are free", WAIT_SECONDS)
        assert client.get_pool(place.pool).host_memory.copied_out_blocks


def test_an_engine_hits_what_a_killed_engine_left_in_host_memory(place: Site) -> None:
    chats = Revisits(12, num_turns=2, num_at_once=4)
    first, *_ = place.engines(1)
    expected = chats.run(first)
    first.kill()
    second, *_ = place.engines(1)
    found = chats.run(second)
    assert [[each.tokens for each in turn] for turn in found] == [[each.tokens for each in turn] for turn in expected]
    assert hit_rate(found[0]) > 2 * hit_rate(expected[0])
    second.stop()
