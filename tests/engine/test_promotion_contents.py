"""What steps read, in schedules of random requests whose copies in the background are made as late as they may be.

A block contains a fingerprint per token, of all tokens up to that one. Each step writes those that it computes, and
reads those before.
"""

import random
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from engine.driving import Driver, make_scheduler, token_at
from engine.test_promotions import NONE, SETUP, service
from kvpool.client.vllm import Scheduler
from kvpool.lending.host_copies import CopyReport

__all__ = ["service"]  # the fixture
BLOCK_TOKENS: Final = SETUP.block_size
SETUPS: Final = {
    "plain": SETUP,
    "a_step_ahead": replace(SETUP, is_async=True),
    "stages": replace(SETUP, num_stages=2),
    "windows": replace(SETUP, num_blocks=48, windows=(0, 40), is_async=True),
    "priority": replace(SETUP, policy="priority", is_async=True),
    "two_groups": replace(SETUP, num_blocks=60, windows=(0, 0)),
}
NUM_ROUNDS: Final = 250


class Contents(defaultdict[int, list[int]]):
    """The fingerprints in each block of both tiers."""

    def __init__(self) -> None:
        super().__init__(lambda: [0] * BLOCK_TOKENS)

    def copy_blocks(self, copies: Any) -> None:
        for source, target in copies:
            self[target] = self[source].copy()


class Engine:
    """An engine on blocks that others may use, too. Its device runs steps late."""

    def __init__(self, name: str, folder: Path, setup: Any, contents: Contents, rng: random.Random) -> None:
        reserve_tokens = rng.choice([0, 32])
        kvpool = {
            "address": "unix:/none",
            "pool": name[: name.index("-")],
            "memory_id": "gpu0",
            "reserve_tokens": reserve_tokens,
        }
        self.scheduler = make_scheduler(Scheduler, replace(setup, additional_config={"kvpool": kvpool}), folder)
        self.calls.promotions.max_blocks = rng.choice([1, 2, 3])
        self.driver = Driver(self.scheduler, setup)
        self.num_batches = 0
        self._name, self._windows, self._contents, self._rng = name, setup.windows, contents, rng
        self._prompts: dict[str, list[int]] = {}
        self._launched: deque[Any] = deque()
        self._batches: deque[Any] = deque()
        self._num_made = 0
        self._tables: dict[str, list[list[int]]] = {}

    @property
    def calls(self) -> Any:
        return self.scheduler.kv_cache_manager.calls

    @property
    def _live(self) -> list[str]:
        return [name for name, request in self.driver.requests.items() if not request.is_finished()]

    def do_something(self) -> None:
        """Gets requests, aborts one, or runs a round."""
        rng, choice = self._rng, self._rng.random()
        if choice < 0.25 and len(self._live) < 8:
            family = rng.randrange(6)
            for _ in range(rng.choice([1, 1, 3])):
                name = f"{self._name}{len(self._prompts)}"
                self._prompts[name] = _prompt(rng, family)
                priority = {"priority": rng.randrange(3)} if self.scheduler.policy.value == "priority" else {}
                self.driver.add(name, self._prompts[name], rng.choice([1, 3, 20, 60]), **priority)
        elif choice < 0.28 and self._live:
            self.driver.abort(rng.choice(self._live))
        elif choice < 0.283:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif self.scheduler.has_requests():
            self.run_round()

    def run_round(self) -> None:
        """Schedules a round. Some steps and copies in the background end."""
        output = self.scheduler.schedule()
        for each in (self._launched, self.driver._outputs):
            each.append(output)
        while self._launched and self._rng.random() < 0.6:
            self._execute(self._launched.popleft())
        if len(self.driver._outputs) > self.driver._lag:
            self.settle()
        if self._rng.random() < 0.15:
            self._join(self._num_made + 1)

    def settle(self) -> None:
        """Takes the oldest outputs, after their step has run."""
        while any(each is self.driver._outputs[0] for each in self._launched):
            self._execute(self._launched.popleft())
        self.driver.report = CopyReport(num_made=self._num_made)
        self.driver.settle()

    def _join(self, num_batches: int) -> None:
        while self._batches and self._num_made < num_batches:
            self._contents.copy_blocks(self._batches.popleft())
            self._num_made += 1

    def _execute(self, output: Any) -> None:
        orders = getattr(output, "kvpool_copies", NONE)
        self._join(orders.joined)
        self._contents.copy_blocks(orders.before)
        if orders.beside:
            self._batches.append(orders.beside)
            self.num_batches += 1
        self._join(orders.joined)
        starts = self._read_tables(output)
        for name, num_tokens in output.num_scheduled_tokens.items():
            start = starts[name]
            fingerprints = self._fingerprints(name, start + num_tokens)
            for window, table in zip(self._windows, self._tables[name], strict=True):
                for place in range(start, start + num_tokens):
                    self._contents[table[place // BLOCK_TOKENS]][place % BLOCK_TOKENS] = fingerprints[place]
                for place in range(max(0, start - window + 1) if window else 0, start):
                    found = self._contents[table[place // BLOCK_TOKENS]][place % BLOCK_TOKENS]
                    assert found == fingerprints[place], f"{name} reads a wrong token {place}"

    def _read_tables(self, output: Any) -> dict[str, int]:
        """Takes the blocks of an output's requests; returns their numbers of computed tokens."""
        starts = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [[*ids] for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        again = output.scheduled_cached_reqs
        for name, start, new_ids in zip(again.req_ids, again.num_computed_tokens, again.new_block_ids, strict=True):
            starts[name] = start
            if name in again.resumed_req_ids:
                self._tables[name] = [[*ids] for ids in new_ids]
            elif new_ids:
                for table, ids in zip(self._tables[name], new_ids, strict=True):
                    table.extend(ids)
        return starts

    def _fingerprints(self, name: str, count: int) -> list[int]:
        prompt, found, last = self._prompts[name], [], 0
        for place in range(count):
            last = hash((last, prompt[place] if place < len(prompt) else token_at(name, place)))
            found.append(last)
        return found


def _prompt(rng: random.Random, family: int) -> list[int]:
    """A prompt that begins as those of its family do."""
    of_family = random.Random(family)
    tokens = [of_family.randrange(512) for _ in range(130)]
    if rng.random() < 0.3:
        place, of_branch = rng.randrange(130), random.Random(rng.randrange(3))
        tokens[place:] = [of_branch.randrange(512) for _ in tokens[place:]]
    return tokens[: rng.choice([20, 40, 70, 100, 120])]


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 30), marks=pytest.mark.complete)])
@pytest.mark.parametrize("kind", SETUPS)
@pytest.mark.usefixtures("service")
def test_every_step_reads_what_was_computed(kind: str, seeds: range, tmp_path: Path) -> None:
    assert sum(_run(kind, seed, tmp_path) for seed in seeds) > 0


def _run(kind: str, seed: int, folder: Path) -> int:
    """Runs one or two engines; returns how many batches they copied in the background."""
    rng, contents, num_engines = random.Random(f"{kind} {seed}"), Contents(), 1 + seed % 2
    num_blocks = SETUPS[kind].num_blocks + rng.choice([0, 4, 12]) * num_engines
    setup = replace(SETUPS[kind], num_blocks=num_blocks, max_num_seqs=rng.choice([3, 4, 8]))
    engines = [Engine(f"p{seed}-{i}-", folder, setup, contents, rng) for i in range(num_engines)]
    for _ in range(NUM_ROUNDS * num_engines):
        rng.choice(engines).do_something()
    for _ in range(3000):
        for engine in engines:
            if engine.scheduler.has_requests():
                engine.run_round()
    for engine in engines:
        assert not engine.scheduler.has_requests(), "requests are never scheduled"
        while engine.driver._outputs:
            engine.settle()
        newest = engine.scheduler.kv_cache_manager.session.sequence
        assert engine.calls.promotions.last_executed(newest) == newest, "no round came after a batch"
    return sum(engine.num_batches for engine in engines)
