"""Engines that sleep: their memory is unmapped, their cached prefixes stay in the pool, and other engines go on."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.models import VOCABULARY
from engine.serving import AHEAD, BLOCK_TOKENS, SLOW, Answer, ServedEngine, Site, site
from kvpool.client import connect
from kvpool.client.admin import AdminClient
from support.waiting import wait_until

NUM_BLOCKS = 600
"""Nothing is evicted."""
MAX_TOKENS = 24


def _prompts(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    head = [draw.randrange(3, VOCABULARY) for _ in range(96)]
    return [[*head, *(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(40, 150)))] for _ in range(count)]


OF_SLEEPER, OF_OTHER = _prompts(1, 8), _prompts(2, 12)


def _ask(engine: ServedEngine, name: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    return [engine.ask(f"{name}-{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)]


def _tokens(engine: ServedEngine, answers: Sequence[Answer]) -> list[list[int]]:
    engine.wait(*answers)
    return [answer.tokens for answer in answers]


def _answer(engine: ServedEngine, name: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return _tokens(engine, _ask(engine, name, prompts))


def _are_hit(answers: Sequence[Answer]) -> bool:
    """Whether each request hit as much of its prompt as can be hit."""
    hits = [(len(answer.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for answer in answers]
    return [answer.cached_tokens for answer in answers] == hits


@pytest.fixture(scope="module")
def expected(address: str) -> dict[int, list[list[int]]]:
    """What vLLM alone answers, by the number of prompts."""
    with site(address, NUM_BLOCKS, "alone") as place:
        engine = place.engine(is_attached=False)
        return {len(prompts): _answer(engine, f"{len(prompts)}", prompts) for prompts in (OF_SLEEPER, OF_OTHER)}


@pytest.fixture
def place(address: str, tmp_path: Path) -> Iterator[Site]:
    with site(address, NUM_BLOCKS, f"sleep-{tmp_path.name}") as started:
        yield started


@pytest.mark.slow
def test_an_engine_sleeps_under_the_load_of_another_and_wakes_with_its_cache(
    place: Site, expected: dict[int, list[list[int]]]
) -> None:
    sleeper, other = place.engine(), place.engine()
    assert _answer(sleeper, "a", OF_SLEEPER) == expected[8]
    other.wait_ready()
    resident = sleeper.resident_shared_mib
    for level in (1, 1, 2):
        running = _ask(other, f"running-{level}", OF_OTHER)
        sleeper.call("sleep", level)
        assert sleeper.resident_shared_mib < resident / 10
        assert _tokens(other, running) == expected[12]
        hits = _ask(other, "hits", OF_SLEEPER)
        assert _tokens(other, hits) == expected[8]
        assert _are_hit(hits), "the prefixes of the engine that sleeps are cached"
        running = _ask(other, "again", OF_OTHER)
        sleeper.call("wake_up")
        assert _tokens(other, running) == expected[12]
        woken = _ask(sleeper, "woken", OF_SLEEPER)
        assert _tokens(sleeper, woken) == expected[8]
        assert _are_hit(woken) == (level == 1), "after level 2 it may have other weights"
    with AdminClient(place.service) as admin:
        admin.set_weights_version(place.pool, "drawn")
    woken = _ask(sleeper, "same", OF_SLEEPER)
    assert _tokens(sleeper, woken) == expected[8]
    assert _are_hit(woken), "an operator has said that it has the same weights"


@pytest.mark.complete  # engines of its own
@pytest.mark.parametrize("options", [{}, AHEAD | SLOW], ids=["", "a step ahead"])
def test_requests_that_are_kept_during_a_sleep_are_answered_afterwards(
    place: Site, expected: dict[int, list[list[int]]], options: dict[str, object]
) -> None:
    engine = place.engine(options=options)
    for i, tags in enumerate(([["weights"], ["kv_cache"]], [["kv_cache", "weights"]])):
        running = _ask(engine, f"{i}", OF_OTHER)
        engine.wait_for_steps(engine.num_steps + 10)
        engine.call("sleep", 1, "keep")
        with connect(place.service) as client:
            assert client.get_pool(place.pool).free_blocks == NUM_BLOCKS - 1
        for each in tags:
            engine.call("wake_up", each)
        assert _tokens(engine, running) == expected[12]


@pytest.mark.complete  # engines of its own
def test_only_the_kv_cache_is_released(place: Site, expected: dict[int, list[list[int]]]) -> None:
    engine = place.engine()
    assert _answer(engine, "a", OF_SLEEPER) == expected[8]
    resident = engine.resident_shared_mib
    engine.call("sleep", 0)
    engine.call("step")  # forgets the requests that have ended
    engine.call("release_kv_cache_memory")
    assert engine.resident_shared_mib < resident / 10
    engine.call("wake_up")
    woken = _ask(engine, "b", OF_SLEEPER)
    assert _tokens(engine, woken) == expected[8]
    assert _are_hit(woken)
    _, error = engine.try_call("sleep", 1, "nonsense")
    assert "Invalid pause mode" in error
    engine.call("reset_prefix_cache")
    woken = _ask(engine, "c", OF_SLEEPER)
    assert _tokens(engine, woken) == expected[8]
    assert not woken[0].cached_tokens, "a reset that a user asks for drops the prefixes"


@pytest.mark.complete  # engines of its own
def test_an_engine_wakes_after_its_lender_was_killed_and_started_again(
    place: Site, expected: dict[int, list[list[int]]]
) -> None:
    engine = place.engine(deadline_seconds=5, lease_seconds=3)  # it sleeps for longer than its lease
    assert _answer(engine, "a", OF_SLEEPER) == expected[8]
    engine.call("sleep", 1)
    place.lender.kill()
    _, error = engine.try_call("wake_up")
    assert "the connection to the lender is broken" in error
    place.start_lender()
    engine.call("wake_up")
    woken = _ask(engine, "b", OF_SLEEPER)
    assert _tokens(engine, woken) == expected[8]
    assert _are_hit(woken)


@pytest.mark.complete  # engines of its own
def test_a_killed_engine_that_sleeps_ends_its_session_at_once_and_leaves_its_prefixes(
    place: Site, expected: dict[int, list[list[int]]]
) -> None:
    sleeper, other = place.engine(lease_seconds=3600), place.engine()
    other.wait_ready()
    assert _answer(sleeper, "a", OF_SLEEPER) == expected[8]
    sleeper.call("sleep", 1)
    with connect(place.service) as client:
        assert client.get_pool(place.pool).sessions == 2
        sleeper.kill()
        wait_until(lambda: client.get_pool(place.pool).sessions == 1, "the lender has noticed", 10.0)
        assert client.get_pool(place.pool).free_blocks == NUM_BLOCKS - 1
    hits = _ask(other, "b", OF_SLEEPER)
    assert _tokens(other, hits) == expected[8]
    assert _are_hit(hits)
