"""Measures what lent memory gives to real vLLM engines, and checks what it promises.

    python -m engine.measure_lending [WHAT...] [--kills 30] [--ahead]

WHAT are some of chats, kills, restarts, successors, upgrade, stops, sleeps and host-kills; by default all.

Prints tables for the documentation and one JSON object as the last line. Fails when a promise is broken: a token that
differs from vLLM alone, a block with wrong contents, a request that fails, or a block that is given out too early.
"""

import argparse
import json
import os
import random
import select
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.host_kills import host_kills
from engine.lent_blocks import computed_blocks, memory_of, wrong_blocks
from engine.load import Load, drawn, of_vllm_alone, tokens
from engine.service import service
from engine.serving import AHEAD, BLOCK_TOKENS, SLOW, Answer, ServedEngine, Site, site
from kvpool.client import Client, connect
from kvpool.client.admin import AdminClient
from support.waiting import wait_until

NUM_BLOCKS = 384
NUM_CHATS, NUM_TURNS, CHATS_AT_ONCE = 100, 5, 20
SYSTEM_TOKENS, ANSWER_TOKENS = 128, 16
WAIT_SECONDS = 60.0
LAYERS = 2
NUM_FEW_BLOCKS, NUM_LOADED = 60, 500
"""Blocks for a quarter of the requests that two engines run at once, and requests of each engine."""
NUM_MANY_BLOCKS = 768
"""Blocks for the prompts of a few engines that start one after the other, so that the oldest is still cached."""
CACHED_TOKENS, NEW_TOKENS = 60 * BLOCK_TOKENS, 80
"""The parts of a prompt of 2,000 tokens: what an earlier engine has computed, and what none has."""
LARGER_MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}
"""What differs from the other model, so that two cores compute such a prompt in more than 300 ms."""


class Chats:
    """Chats of several turns: each prompt is the chat so far and a new question. Five system prompts."""

    def __init__(self, seed: int = 1) -> None:
        draw = random.Random(seed)
        systems = [drawn(draw, SYSTEM_TOKENS) for _ in range(5)]
        self._chats = [draw.choice(systems)[:] for _ in range(NUM_CHATS)]
        self._questions = [[drawn(draw, draw.randint(20, 60)) for _ in range(NUM_TURNS)] for _ in range(NUM_CHATS)]
        self._routes = [[draw.randrange(2) for _ in range(NUM_TURNS)] for _ in range(NUM_CHATS)]

    def run(
        self, engines: Sequence[ServedEngine], after_wave: Callable[[int], object] = lambda _: None
    ) -> list[Answer]:
        """Sends each turn to one of the engines, twenty chats at a time; returns all answers, in order."""
        answers: list[Answer] = []
        waves = [(first, turn) for first in range(0, NUM_CHATS, CHATS_AT_ONCE) for turn in range(NUM_TURNS)]
        for number, (first, turn) in enumerate(waves):
            asked = []
            for i in range(first, first + CHATS_AT_ONCE):
                self._chats[i] += self._questions[i][turn]
                engine = engines[self._routes[i][turn] % len(engines)]
                asked.append((engine, i, engine.ask(f"{number}-{i}", self._chats[i], ANSWER_TOKENS)))
            for engine, i, answer in asked:
                engine.wait(answer)
                self._chats[i] = [*self._chats[i], *answer.tokens]
                answers.append(answer)
            after_wave(number)
        return answers


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    prompt, cached = sum(len(each.prompt) for each in answers), sum(each.cached_tokens for each in answers)
    return {
        "requests": len(answers),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "hit_rate": round(cached / prompt, 4),
    }


def all_tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [each.tokens for each in answers]


def plain_answers(place: Site, num_blocks: int, count: int = 1) -> list[Answer]:
    """What vLLM alone answers, in one or several engines with memory of their own."""
    engines = place.engines(count, is_attached=False, num_blocks=num_blocks)
    answers = Chats().run(engines)
    for engine in engines:
        engine.stop()
    return answers


def chats(place: Site, client: Client) -> dict[str, Any]:
    """Two engines on one memory, beside one engine with all of it, and two with half of it each."""
    alone = plain_answers(place, NUM_BLOCKS)
    halves = plain_answers(place, NUM_BLOCKS // 2, 2)
    shared = Chats().run(place.engines(2))
    across = client.get_pool(place.pool).prefix_cache.shared_hits_tokens
    assert all_tokens(shared) == all_tokens(alone) == all_tokens(halves), "a token differs"
    return {
        "two engines on one memory": {**summary(shared), "hits_of_the_other_engine": across},
        "two engines with half the memory each": summary(halves),
        "one engine with all the memory": summary(alone),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return {"p50_ms": round(statistics.median(ordered) * 1000, 2), "p99_ms": round(p99 * 1000, 2)}


class Exits:
    """When the processes of a session exit."""

    def __init__(self, session: int) -> None:
        self._running: set[int] = set()
        self._last_seconds = 0.0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == session:
                    self._running.add(os.pidfd_open(int(path.name)))

    def update(self) -> float:
        """Looks which have exited; returns when the last one did, or now if one still runs."""
        if self._running:
            self._last_seconds = time.monotonic()
            for pidfd in select.select(self._running, [], [], 0)[0]:
                self._running.remove(pidfd)
                os.close(pidfd)
        return self._last_seconds

    def close(self) -> None:
        """Closes what it looks at."""
        for pidfd in self._running:
            os.close(pidfd)


def killed(engine: ServedEngine, is_free: Callable[[], bool], *, is_core_alone: bool) -> tuple[float, float]:
    """Kills an engine, or its core alone; returns the seconds until its blocks are free, also since its last exit."""
    with closing(Exits(engine.process.pid)) as exits:
        if is_core_alone:
            engine.process.kill()
        else:
            engine.signal(signal.SIGKILL)
        start = time.monotonic()
        while not is_free():
            exits.update()
            assert time.monotonic() < start + WAIT_SECONDS, "blocks are not free again"
        end = time.monotonic()
        seconds = end - start, max(end - exits.update(), 0.0)
    engine.kill()
    return seconds


def kills(place: Site, client: Client, count: int) -> dict[str, Any]:
    """Kills an engine in the middle of its work, again and again; the next one is there already, or starts."""
    draw = random.Random(2)
    systems = [drawn(draw, 640) for _ in range(4)]
    prompts = [systems[i % 4] + drawn(draw, draw.randint(1, 60)) for i in range(12)]
    expected = place.of_vllm_alone(prompts, 60)
    free: dict[str, list[float]] = {}
    engine = place.engine()
    for i, prompt in enumerate(prompts):
        engine.wait(engine.ask(f"w{i}", prompt, 60))
    total = client.get_pool(place.pool).free_blocks
    for turn in range(count):
        (following,) = place.engines(1)
        before = engine.num_steps
        for i, prompt in enumerate(prompts):
            engine.ask(f"{turn}-{i}", prompt, 60)
        engine.wait_for_steps(before + draw.randint(1, 55))
        time.sleep(draw.random() / 200)  # an arbitrary instant within a step
        is_core_alone = bool(place.attached) and turn % 2 == 1
        after_kill, after_exit = killed(
            engine, lambda: client.get_pool(place.pool).free_blocks == total, is_core_alone=is_core_alone
        )
        what = "the core" if is_core_alone else "all processes"
        free.setdefault(f"blocks free after the kill of {what}", []).append(after_kill)
        free.setdefault(f"the same, after the exit of all processes, {what} killed", []).append(after_exit)
        engine = following
        answers = [engine.ask(f"{turn}+{i}", prompt, 60) for i, prompt in enumerate(prompts)]
        engine.wait(*answers)
        assert all_tokens(answers) == all_tokens(expected), "a token differs"
    contents = computed_blocks(place, [[*each.prompt, *each.tokens] for each in expected], NUM_BLOCKS)
    wrong, compared = wrong_blocks(place, contents)
    assert not wrong, f"blocks with wrong contents: {wrong}"
    return {
        "kills": count,
        **{name: percentiles(seconds) for name, seconds in free.items()},
        "blocks compared": compared.total(),
    }


def restarts(place: Site, _: Client, count: int) -> dict[str, Any]:
    """Kills an engine, again and again, and measures the first token of the next one.

    Each engine first answers a request that no figure counts, so that its own warm-up is in none, and then one that is
    measured. Three kinds of engines take turns, in a random order each time.
    """
    draw = random.Random(6)
    known = drawn(draw, CACHED_TOKENS)
    options = {"hf_overrides": LARGER_MODEL, "max_model_len": 2048, "max_num_batched_tokens": 2048}
    engine = place.engine(options=options)
    engine.wait(engine.ask("known", known, 1))
    first: dict[str, list[float]] = {"vLLM alone, computed": [], "kvpool, computed": [], "kvpool, cached": []}
    for kind in [kind for _ in range(count) for kind in draw.sample(sorted(first), len(first))]:
        engine.ask("unfinished", drawn(draw, 200), 1000)
        engine.wait_for_steps(engine.num_steps + draw.randint(1, 20))
        engine.kill()
        engine = place.engine(is_attached=kind.startswith("kvpool"), options=options)
        engine.wait(engine.ask("not counted", drawn(draw, CACHED_TOKENS + NEW_TOKENS), 1))
        head = known if kind.endswith("cached") else drawn(draw, CACHED_TOKENS)
        answer = engine.ask("measured", head + drawn(draw, NEW_TOKENS), 1)
        engine.wait(answer)
        cached = len(known) if head is known else 0
        assert answer.cached_tokens == cached, f"{answer.cached_tokens} tokens were cached"
        first[kind].append(answer.first_seconds)
    return {"engines of each kind": count, **{kind: deciles(seconds) for kind, seconds in first.items()}}


def deciles(seconds: Sequence[float]) -> dict[str, float]:
    found = [1000 * each for each in statistics.quantiles(seconds, n=10, method="inclusive")]
    return {f"p{10 * i}_ms": round(found[i - 1], 1) for i in (1, 5, 9)}


def successors(place: Site, _: Client, count: int) -> dict[str, Any]:
    """Two engines serve 500 requests each in little memory. When one is killed, another takes its requests over."""
    draw = random.Random(5)
    loads = [Load(name, NUM_LOADED) for name in "ab"]
    plain = {name: option for name, option in place.attached.items() if name not in SLOW}
    expected = of_vllm_alone(place, plain, loads)
    waiting = [load.names for load in loads]
    portion = NUM_LOADED // count
    engines = [place.engine() for _ in loads]
    finished: dict[str, Answer] = {}
    again = 0
    for turn in range(count):
        following = place.engine()
        for engine in (*engines, following):
            engine.wait_ready()
        for load, engine, names in zip(loads, engines, waiting, strict=True):
            load.ask(engine, names[:portion])
            del names[:portion]
        killed = engines[turn % 2]
        killed.wait_for_steps(killed.num_steps + draw.randint(1, 100))
        time.sleep(draw.random() / 100)  # an arbitrary instant within a step
        killed.kill()
        finished |= {name: answer for name, answer in killed.answers.items() if answer.is_finished}
        unfinished = [name for name in killed.answers if name not in finished]
        again += len(unfinished)
        if unfinished:
            loads[turn % 2].ask(following, unfinished)
        engines[turn % 2] = following
    for load, engine, names in zip(loads, engines, waiting, strict=True):
        load.ask(engine, names)
        engine.wait(*engine.answers.values())
        finished |= engine.answers
        engine.stop()
    cached = sum(answer.cached_tokens for answer in finished.values())
    assert tokens(finished) == expected, "a token differs"
    return {"kills": count, "requests": len(finished), "asked again": again, "cached tokens": cached}


def upgrade(place: Site) -> dict[str, Any]:
    """Moves the traffic from one engine to another under load; compares with one engine that serves it all."""
    alone = plain_answers(place, NUM_BLOCKS)
    blue = place.engine()
    engines = [blue]
    green: list[ServedEngine] = []

    def after_wave(number: int) -> None:
        if number == 8:
            green.append(place.engine())
        if number == 12:
            green[0].wait_ready()
            engines[:] = green
        if number == 13:
            blue.stop()

    answers = Chats().run(engines, after_wave)
    assert all(each.is_finished for each in answers), "a request failed"
    assert all_tokens(answers) == all_tokens(alone), "a token differs"
    assert summary(answers) == summary(alone), "something was computed again"
    return summary(answers)


def stops(place: Site, client: Client) -> dict[str, Any]:
    """Stops an engine for longer than its lease, and kills the lender."""
    draw = random.Random(3)
    prompts = [drawn(draw, 200) for _ in range(8)]
    expected = place.of_vllm_alone(prompts, 100)
    stopped, other = place.engine(lease_seconds=2.0), place.engine()
    for engine in (stopped, other):
        engine.wait_ready()
    for i, prompt in enumerate(prompts):
        stopped.ask(f"{i}", prompt, 800)
    stopped.wait_for_steps(30)
    stopped.signal(signal.SIGSTOP)
    wait_until(lambda: client.get_pool(place.pool).quarantined_sessions == 1, "the lease has expired", WAIT_SECONDS)
    held = client.get_pool(place.pool).quarantined_blocks
    memory = memory_of(place)
    with AdminClient(place.service) as admin:
        blocks = [block.block_id for block in admin.blocks(place.pool) if block.ref_cnt]
    before = memory[:, blocks].clone()
    for _ in range(20):  # more than the pool has, so that every free block is written
        asked = [other.ask(f"{draw.random()}", drawn(draw, 900), 4) for _ in range(8)]
        other.wait(*asked)
    assert torch.equal(memory[:, blocks], before), "a block was given out before the engine answered"
    assert client.get_pool(place.pool).quarantined_blocks == held
    stopped.signal(signal.SIGCONT)
    log = stopped.wait_for_end()
    assert "StaleTablesError" in log or "the session's lease expired" in log, log
    wait_until(lambda: client.get_pool(place.pool).quarantined_sessions == 0, "the blocks are free", WAIT_SECONDS)
    epoch = client.get_pool(place.pool).epoch
    before_kill = [other.ask(f"k{i}", prompt, 100) for i, prompt in enumerate(prompts)]
    other.wait_for_steps(other.num_steps + 20)
    place.lender.kill()
    place.lender = place.start_lender()
    other.wait(*before_kill)
    assert all_tokens(before_kill) == all_tokens(expected), "a token differs"
    wait_until(lambda: client.get_pool(place.pool).epoch == epoch, "the epoch goes on", WAIT_SECONDS)
    again = [other.ask(f"l{i}", prompt, 100) for i, prompt in enumerate(prompts)]
    other.wait(*again)
    assert all_tokens(again) == all_tokens(expected), "a token differs"
    assert all(each.cached_tokens for each in again), "the cache outlives the lender"
    return {"blocks in quarantine": held, "epoch": epoch}


def sleeps(place: Site, client: Client) -> dict[str, Any]:
    """An engine sleeps 30 times while another serves chats, which hit what the first has cached."""
    draw = random.Random(4)
    prompts = [drawn(draw, 640) for _ in range(4)]
    sleeper, other = place.engines(2)
    expected = [sleeper.ask(f"{i}", prompt, 16) for i, prompt in enumerate(prompts)]
    sleeper.wait(*expected)
    awake_mib = sleeper.resident_shared_mib
    asleep_mib: list[float] = []
    seconds: dict[str, list[float]] = {"sleep": [], "wake_up": []}
    first: list[float] = []
    for turn in range(30):
        running = [other.ask(f"r{turn}-{i}", prompt + drawn(draw, 20), 60) for i, prompt in enumerate(prompts)]
        seconds["sleep"].append(sleeper.call("sleep", 1))
        asleep_mib.append(sleeper.resident_shared_mib)
        other.wait(*running)
        assert all(each.cached_tokens == 640 for each in running), "the prefixes of the engine that sleeps are cached"
        running = [other.ask(f"s{turn}-{i}", drawn(draw, 400), 60) for i in range(4)]
        seconds["wake_up"].append(sleeper.call("wake_up"))
        answers = [sleeper.ask(f"{turn}+{i}", prompt, 16) for i, prompt in enumerate(prompts)]
        sleeper.wait(*answers)
        first.append(answers[0].first_seconds)
        assert all_tokens(answers) == all_tokens(expected), "a token differs"
        assert all(each.cached_tokens == 640 - BLOCK_TOKENS for each in answers), "the cache is still there"
        other.wait(*running)
    assert client.get_pool(place.pool).free_blocks == NUM_BLOCKS - 1
    return {
        **{name: percentiles(found) for name, found in seconds.items()},
        "first token after waking": percentiles(first),
        "resident shared MiB awake": round(awake_mib, 1),
        "resident shared MiB asleep": round(max(asleep_mib), 1),
    }


def measured(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the measurements, each on a server and a lender of its own."""
    runs: dict[str, Callable[[Site, Client], dict[str, Any]]] = {
        "chats": chats,
        "kills": partial(kills, count=options.kills),
        "restarts": partial(restarts, count=options.kills),
        "successors": partial(successors, count=options.kills),
        "upgrade": lambda place, _: upgrade(place),
        "stops": stops,
        "sleeps": sleeps,
    }
    blocks = {"successors": NUM_FEW_BLOCKS, "restarts": NUM_MANY_BLOCKS}
    for name in options.what:
        if name == "host-kills":
            with host_kills() as (killing, _):
                yield name, killing.run(options.kills)
            continue
        with (
            TemporaryDirectory() as folder,
            service(Path(folder)) as server,
            site(server.address, blocks.get(name, NUM_BLOCKS)) as place,
            connect(server.address) as client,
        ):
            if options.ahead:
                place.attached = AHEAD | SLOW
            started = time.monotonic()
            found = runs[name](place, client)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
            yield name, found


def main() -> None:
    """Runs what the command line names."""
    every = ["chats", "kills", "restarts", "successors", "upgrade", "stops", "sleeps", "host-kills"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*every, []], default=every)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ahead", action="store_true", help="engines schedule a step ahead, and their steps run late")
    options = parser.parse_args()
    results = dict(measured(options))
    if rows := results.get("chats"):
        print("\n| | hit rate | computed tokens of the prompts | of the other engine's |\n|---|---|---|---|")
        for name, row in rows.items():
            across = f"{row['hits_of_the_other_engine']:,}" if "hits_of_the_other_engine" in row else ""
            print(f"| {name} | {row['hit_rate']:.1%} | {row['computed_tokens']:,} | {across} |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
