"""`vllm serve` on memory that a `kvpool worker` lends. The engines' lease is longer than the tests."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from engine.serving import Site, site
from engine.vllm_serve import REQUESTS, Serving, VllmServe, serving
from engine.workloads import BLOCK_TOKENS
from kvpool.client import connect
from support.waiting import wait_until

pytestmark = [pytest.mark.complete, pytest.mark.timeout(1200)]
POOL = "served-lent"
NUM_BLOCKS = 600
"""Nothing is evicted."""
LONG = [replace(each, max_tokens=300) for each in REQUESTS if len(each.prompt) < 200][:6]


@pytest.fixture
def starts() -> Iterator[Serving]:
    with serving() as started:
        yield started


def _start(starts: Serving, lent: Site) -> VllmServe:
    options = ("--worker-cls", "kvpool.client.vllm.Worker", "--num-gpu-blocks-override", str(NUM_BLOCKS))
    settings = {"address": lent.service, "pool": lent.pool, "memory": lent.memory}
    return starts.start(*options, kvpool=settings)


def test_an_engine_is_killed_beside_another_and_its_successor_hits_its_prefixes(starts: Serving, address: str) -> None:
    of_first, of_second = REQUESTS[:8], REQUESTS[8:]
    expected = starts.tokens_of_vllm_alone(REQUESTS)
    with site(address, NUM_BLOCKS, POOL) as lent, connect(address) as client:
        first, second = _start(starts, lent), _start(starts, lent)
        assert first.complete_all(of_first) == expected[:8]
        answers: list[list[int]] = []
        users = threading.Thread(target=lambda: answers.extend(second.complete_all(of_second)))
        with ExitStack() as stack:
            for each in LONG:
                stack.enter_context(first.begun(each))
            users.start()
            with second.begun(LONG[0]):
                assert client.get_pool(POOL).sessions == 2
                first.kill()
        users.join()
        assert answers == expected[8:]

        def is_free() -> bool:
            pool = client.get_pool(POOL)
            return (pool.sessions, pool.requests, pool.free_blocks) == (1, 0, NUM_BLOCKS - 1)

        wait_until(is_free, f"{client.get_pool(POOL)}")
        successor = _start(starts, lent)
        found = [successor.complete(each) for each in of_first]
    assert [each.tokens for each in found] == expected[:8]
    assert [each.cached_tokens for each in found] == [
        (len(each.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for each in of_first
    ]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_engine_sleeps_while_users_send_requests(starts: Serving, address: str, mode: str) -> None:
    requests = REQUESTS[:8]
    expected = starts.tokens_of_vllm_alone([*requests, LONG[0]])
    with site(address, NUM_BLOCKS, f"{POOL}-{mode}") as lent, connect(address) as client:
        sleeper, other = _start(starts, lent), _start(starts, lent)
        assert sleeper.complete_all(requests) == expected[:-1]
        with ExitStack() as stack:
            running = stack.enter_context(sleeper.begun(LONG[0]))
            answers: list[list[int]] = []
            users = threading.Thread(target=lambda: answers.extend(other.complete_all(requests)))
            users.start()
            assert sleeper.post(f"/sleep?level=1&mode={mode}") == {"status": "sleeping", "level": 1}
            waiting = threading.Thread(target=lambda: answers.append(sleeper.complete(requests[0]).tokens))
            users.join()
            waiting.start()
            wait_until(lambda: client.get_pool(lent.pool).free_blocks == NUM_BLOCKS - 1, "no request holds a block")
            assert sleeper.post("/wake_up?tags=weights")["status"] == "sleeping"
            assert sleeper.post("/wake_up?tags=kv_cache")["status"] == "awake"
            waiting.join()
            assert answers == [*expected[:-1], expected[0]]
            tokens = [token for each in running for token in each]
            assert tokens == expected[-1][: len(tokens)]
            assert (len(tokens) == len(expected[-1])) == (mode != "abort")
        found = [sleeper.complete(each) for each in requests]
    assert [each.tokens for each in found] == expected[:-1]
    assert [each.cached_tokens for each in found] == [
        (len(each.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for each in requests
    ]
