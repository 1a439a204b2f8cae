"""Resets of the prefix cache by one of several engines that share memory: only what that engine hits changes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Setup, make_scheduler
from engine.serving import site
from engine.test_events import published
from engine.test_sharing import PROMPT, SETUP, Engine
from engine.test_sleep import OF_OTHER, OF_SLEEPER, _answer, _ask, _tokens
from kvpool.client import connect
from kvpool.client.vllm.attach import attach
from kvpool.client.vllm.pool_config import UnsupportedError
from kvpool.client.vllm.settings import Settings
from kvpool.core.blocks.prefix_map import MAX_UNUSED_VERSIONS
from support.waiting import wait_until

pytestmark = pytest.mark.complete

HIT = 96
"""Tokens of PROMPT that can be hit."""
LONG = [i * 11 % 512 for i in range(80)]


def shared(address: str, folder: Path, pool: str, setup: Setup = SETUP, **settings: Any) -> Engine:
    return Engine(address, pool, folder, setup, memory_id="gpu0", **settings)


def stop(*engines: Engine) -> None:
    for engine in engines:
        engine.run_all()
        engine.driver.drain()
        engine.scheduler.shutdown()


@pytest.mark.parametrize("version", ["", "7"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "a_step_ahead"])
@pytest.mark.parametrize("resets_running", [False, True], ids=["", "running_too"])
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_reset_takes_all_from_its_own_engine_and_nothing_from_the_others(  # noqa: PLR0913 - what decides a reset
    version: str, address: str, tmp_path: Path, *, is_async: bool, resets_running: bool, is_busy: bool
) -> None:
    setup = replace(SETUP, is_async=is_async, num_blocks=200)
    pool = f"reset.{version}.{is_async}.{resets_running}.{is_busy}"
    one, other = (shared(address, tmp_path, pool, setup, weights_version=version) for _ in range(2))
    one.run("before", PROMPT)
    one.driver.add("running", LONG, 40)
    if is_busy:
        other.driver.add("busy", [3] * 50, 60)
    for _ in range(4):
        one.driver.step()
        other.driver.step()
    one.scheduler.kv_cache_manager.make_prefix_cache_stats()
    assert one.scheduler.reset_prefix_cache(reset_running_requests=resets_running)
    assert one.scheduler.kv_cache_manager.prefix_cache_stats.reset
    assert other.run("hits", PROMPT) == HIT
    one.driver.add("after", PROMPT, 20)
    one.run_all()
    assert one.driver.cached["after"] == 0
    assert one.driver.requests["running"].num_preemptions == resets_running
    assert [len(one.driver.generated[name]) for name in ("running", "after")] == [40, 20]
    # What a request caches that began with the weights before is not hit either, unless it was computed again.
    assert one.run("running again", [*LONG, 1]) == (80 if resets_running else 0)
    assert one.run("again", PROMPT) == HIT
    stop(one, other)


def test_repeated_resets_keep_a_bounded_number_of_old_blocks(address: str, tmp_path: Path) -> None:
    setup = replace(SETUP, num_blocks=2000)
    one, other = (shared(address, tmp_path, "updates", setup) for _ in range(2))
    other.run("own", PROMPT)
    counts = []
    with connect(address) as client:
        for update in range(2 * MAX_UNUSED_VERSIONS):
            assert one.run(f"r{update}", LONG) == 0
            assert one.scheduler.reset_prefix_cache()
            counts.append(client.get_pool("updates").cached_blocks)
    assert counts[-1] == counts[MAX_UNUSED_VERSIONS + 1] < counts[-1] + counts[0]
    assert other.run("hits", PROMPT) == HIT
    stop(one, other)


@pytest.mark.parametrize("is_async", [False, True], ids=["", "a_step_ahead"])
def test_requests_with_a_connector_are_computed_again_after_a_reset(
    address: str, tmp_path: Path, *, is_async: bool
) -> None:
    """Blocks that steps in flight may write are freed later, while the request is admitted again."""
    setup = replace(SETUP, num_blocks=200, is_async=is_async, load_failures="recompute")
    one = shared(address, tmp_path, f"connector.{is_async}", setup)
    one.scheduler.connector.reset_cache = reset_cache = Mock(return_value=True)
    for i in range(8):
        one.driver.add(f"r{i}", [i * 5 % 500, *LONG], 30)
    for _ in range(6):
        one.driver.step()
        assert one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    one.run_all()
    assert all(len(tokens) == 30 for tokens in one.driver.generated.values())
    assert reset_cache.call_count == 6
    stop(one)


def test_a_router_learns_of_the_reset_of_its_engine_alone(address: str, tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/{i}" for i in range(2)]
    engines = [shared(address, tmp_path, "reset", replace(SETUP, events_endpoint=each)) for each in endpoints]
    engines[0].run("a", PROMPT)

    def count_cleared() -> list[int]:
        return [sum(isinstance(event, AllBlocksCleared) for event in published(each)) for each in endpoints]

    wait_until(lambda: count_cleared() == [1, 1], "each engine begins with an empty cache")
    assert engines[0].scheduler.reset_prefix_cache()
    wait_until(lambda: count_cleared() == [2, 1], "one engine has an empty cache again")
    stop(*engines)


def test_private_memory_is_reset_as_by_vllm(address: str, tmp_path: Path) -> None:
    """A request that holds blocks refuses the reset, and what was cached stays."""
    own = Engine(address, "private", tmp_path)
    plain = Engine.__new__(Engine)
    plain.scheduler = make_scheduler(Plain, SETUP, tmp_path)
    plain.driver = type(own.driver)(plain.scheduler, SETUP)
    found = []
    for engine in (own, plain):
        cached = [engine.run("a", PROMPT)]
        engine.driver.add("running", LONG, 40)
        engine.driver.step()
        is_reset = [engine.scheduler.reset_prefix_cache()]
        cached.append(engine.run("b", PROMPT))
        is_reset.append(engine.scheduler.reset_prefix_cache())
        cached.append(engine.run("c", PROMPT))
        found.append((cached, is_reset))
        stop(engine)
    assert found == [([0, HIT, 0], [False, True])] * 2


@pytest.mark.slow
def test_tokens_after_new_weights_and_a_reset_beside_a_busy_engine(address: str, tmp_path: Path) -> None:
    with site(address, 600, f"reset-{tmp_path.name}") as place:
        trained, other, alone = place.engine(), place.engine(), place.engine(is_attached=False)
        answers = []
        for engine in (trained, alone):
            before = _answer(engine, "before", OF_SLEEPER)
            if engine is trained:
                other.wait_ready()
                running = _ask(other, "running", OF_OTHER)
                other.wait_for_steps(5)
            engine.call("apply_model", "engine.drawn_weights.load_other_weights")
            engine.call("reset_prefix_cache")
            asked = _ask(engine, "after", OF_SLEEPER)
            answers.append((before, _tokens(engine, asked), [each.cached_tokens for each in asked]))
        assert answers[0] == answers[1]
        assert answers[0][0] != answers[0][1]
        other.wait(*running)
        hits = _ask(other, "hits", OF_SLEEPER)
        assert _tokens(other, hits) == answers[0][0]
        assert all(each.cached_tokens for each in hits)


def test_sleep_mode_is_refused_in_memory_that_engines_name_themselves() -> None:
    """It discards the contents, which other engines would still hit. A lender keeps them."""
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True)))
    with pytest.raises(UnsupportedError, match="sleep mode with a memory_id"):
        attach(scheduler, Settings(address="localhost:1", pool="p", memory_id="gpu0"))
