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
    started = starts.start(*options, kvpool=settings)
    started.wait_ready()
    return started


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
