"""A service or a lender that is killed under load, and is away for a while: engines wait for it, and none ends."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pytest

from engine.load import Load, of_vllm_alone, tokens
from engine.service import Service, service
from engine.serving import AHEAD, SLOW, Site, site
from kvpool.client import PoolInfo, connect

NUM_BLOCKS = 120
NUM_STEPS, NUM_REQUESTS = 20, 60
LEASE_SECONDS = 5.0
Away: TypeAlias = Callable[[Service, Site], AbstractContextManager[None]]


@contextmanager
def _service_away(server: Service, _: Site) -> Iterator[None]:
    server.kill()
    yield
    server.restart()


@contextmanager
def _lender_away(_: Service, place: Site) -> Iterator[None]:
    place.lender.kill()
    yield
    place.lender = place.start_lender()


def _pool(place: Site) -> PoolInfo:
    with connect(place.service) as client:
        return client.get_pool(place.pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "settings"),
    [
        pytest.param(2 * LEASE_SECONDS, {"lease_seconds": LEASE_SECONDS}, id="two leases"),
        pytest.param(60.0, {}, id="a minute", marks=pytest.mark.complete),
    ],
)
@pytest.mark.parametrize("away", [_service_away, _lender_away], ids=["service", "lender"])
def test_engines_wait_and_answer_as_vllm_alone(
    away: Away, seconds: float, settings: dict[str, Any], tmp_path: Path
) -> None:
    with (
        TemporaryDirectory() as folder,
        service(Path(folder), "--journal", str(tmp_path / "journal")) as server,
        site(server.address, NUM_BLOCKS) as place,
    ):
        loads = [Load(name, NUM_REQUESTS) for name in "ab"]
        expected = of_vllm_alone(place, AHEAD, loads)
        engines = place.engines(len(loads), options=AHEAD | SLOW, **settings)
        begun = _pool(place)
        for load, engine in zip(loads, engines, strict=True):
            load.ask(engine)
        for engine in engines:
            engine.wait_for_steps(NUM_STEPS)
        with away(server, place):
            # The length of the outage is what is tested: engines must outlast it, on their own clocks.
            time.sleep(seconds)
            assert not any(all(answer.is_finished for answer in engine.answers.values()) for engine in engines)
        for engine in engines:
            engine.wait(*engine.answers.values())
        assert tokens({**engines[0].answers, **engines[1].answers}) == expected
        assert _pool(place).epoch == begun.epoch
