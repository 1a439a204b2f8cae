"""A real server's ports under attack while a scheduler works: all its answers are correct and in time."""

import json
import statistics
from collections.abc import Iterator

import pytest

from fuzz import attacks_bytes, attacks_grpc, attacks_links
from fuzz.attacked import Canary, Server, check_alive
from support.waiting import wait_until

MAX_GROWTH_BYTES = 192 * 2**20
"""A few times the maximum message size: the encoded and decoded message, and memory kept by the allocator."""
MAX_ROUND_SECONDS = 30.0
MAX_FILES_LEFT = 4

ATTACKS = {**attacks_bytes.ATTACKS, **attacks_grpc.ATTACKS, **attacks_links.ATTACKS}

SLOW = {
    *("bombs", "framing", "rapid reset", "rapid reset of whole calls", "garbage", "a thousand streams"),
    "a flood of empty data",
}


class Siege:
    """The server, its canary, and the server's resources before the attacks."""

    def __init__(self, server: Server, canary: Canary) -> None:
        self.server, self.canary = server, canary
        wait_until(lambda: len(canary.seconds) >= 20 or canary.error is not None, "the canary begins")
        assert not canary.error, canary.error
        self.quiet_seconds = statistics.median(canary.seconds)
        self.first_bytes, self.first_files = server.rss_bytes(), server.num_files()

    def figures(self) -> dict[str, float]:
        """Response times of the canary, and growth of the server's resources."""
        times = sorted(self.canary.seconds)
        return {
            "attacks": len(ATTACKS),
            "canary_rounds": len(times),
            "quiet_p50_ms": round(self.quiet_seconds * 1000, 2),
            "p50_ms": round(times[len(times) // 2] * 1000, 2),
            "p99_ms": round(times[len(times) * 99 // 100] * 1000, 2),
            "max_ms": round(times[-1] * 1000, 2),
            "rss_growth_bytes": self.server.rss_bytes() - self.first_bytes,
            "files_left": self.server.num_files() - self.first_files,
        }

    def check(self) -> None:
        rounds = len(self.canary.seconds)
        check_alive(self.server)
        wait_until(
            lambda: len(self.canary.seconds) >= rounds + 3 or self.canary.error is not None, "the canary continues"
        )
        assert not self.canary.error, self.canary.error
        assert self.server.rss_bytes() - self.first_bytes < MAX_GROWTH_BYTES


@pytest.fixture(scope="module")
def siege() -> Iterator[Siege]:
    with Server() as server:
        with Canary(server.address) as canary:
            under = Siege(server, canary)
            yield under
            wait_until(lambda: server.num_files() <= under.first_files + MAX_FILES_LEFT, "files are closed")
            under.check()
        figures = under.figures()
        print(json.dumps(figures))  # noqa: T201 - shown with -s
        assert not canary.error, canary.error
        assert figures["max_ms"] < MAX_ROUND_SECONDS * 1000


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ATTACKS]
)
def test_a_server_under_attack_serves_its_scheduler(siege: Siege, name: str) -> None:
    ATTACKS[name](siege.server)
    siege.check()
