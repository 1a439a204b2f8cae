"""Requests that go on with further input, which extends their prompts: steps and hits are those of vLLM."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as PlainAsync
from vllm.v1.core.sched.scheduler import Scheduler as Plain
from vllm.v1.request import RequestStatus

from engine.driving import Driver, make_scheduler
from engine.schedules import KINDS, setup_of
from kvpool.client.vllm import Scheduler

pytestmark = pytest.mark.complete
STREAMED = [
    "a_step_ahead", "sparse_windows", "sparse_windows_a_step_ahead", "windows_in_segments", "sizes",
    "sizes_a_step_ahead", "states", "states_a_step_ahead", "states_in_segments", "exported_states", "larger_states",
]  # fmt: skip
"""Kinds in which the length of a prompt decides what is cached, one of them without.

Kinds with hits within blocks are left out: there vLLM forgets the end of a prompt if the prompt then ends later in the
same block, and the service keeps both.
"""
SEEDS = range(4)


def play(scheduler_class: Any, setup: Any, seed: int, folder: Path) -> tuple[list[Any], dict[str, int]]:
    """Conversations of several turns beside requests that begin with the tokens of one; returns steps and hits."""
    rng = random.Random(seed)
    driver = Driver(make_scheduler(scheduler_class, setup, folder), setup)
    steps: list[Any] = []
    waiting: list[str] = []
    for i in range(150):
        draw = rng.random()
        prompt = [rng.randrange(8) for _ in range(rng.randrange(1, 60))]
        if draw < 0.2:
            driver.add(f"s{i}", [i % 3, *prompt], rng.randrange(1, 20), resumable=True)
        elif draw < 0.5 and waiting:
            known = list(driver.requests[waiting[0]].all_token_ids)
            driver.add(f"r{i}", [*known[: rng.randrange(1, len(known) + 1)], *prompt], 3)
            driver.add(rng.choice(waiting), prompt, rng.randrange(1, 20), resumable=True)
        elif draw < 0.6 and waiting:
            driver.scheduler.finish_requests(rng.choice(waiting), RequestStatus.FINISHED_ABORTED)
        steps += [driver.step() for _ in range(rng.randrange(6))]
        requests = driver.scheduler.requests
        waiting = [name for name, each in requests.items() if each.status == RequestStatus.WAITING_FOR_STREAMING_REQ]
    driver.drain()
    driver.scheduler.shutdown()
    return steps, driver.cached


@pytest.mark.parametrize("kind", STREAMED)
def test_conversations_in_one_request_are_those_of_vllm(kind: str, address: str, tmp_path: Path) -> None:
    hits = 0
    for seed in SEEDS:
        setup = replace(setup_of(KINDS[kind], seed), num_blocks=400)
        plain = play(PlainAsync if setup.is_async else Plain, setup, seed, tmp_path)
        attached = {"kvpool": {"address": address, "pool": f"streaming.{kind}.{seed}"}}
        assert play(Scheduler, replace(setup, additional_config=attached), seed, tmp_path) == plain, f"seed {seed}"
        hits += sum(plain[1].values())
    assert hits > 1000
