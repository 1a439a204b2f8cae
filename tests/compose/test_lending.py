"""The profile `lending`: engines in containers that map the memory of another container."""

import json
from collections.abc import Iterator

import pytest

from support.compose import Stack, eventually

pytestmark = pytest.mark.complete

ENGINES = ("engine-0", "engine-1")


@pytest.fixture
def lending(stack: Stack) -> Iterator[Stack]:
    """The stack; engines, lender and their server are removed afterwards."""
    yield stack
    stack.compose("--profile", "lending", "rm", "--stop", "--force", "lending-server", "lender", *ENGINES)


def counts(stack: Stack, engine: str) -> dict[str, int]:
    """Runs an engine to its end; returns what it printed."""
    stack.compose("--profile", "lending", "up", "-d", "--no-build", "--no-deps", engine)

    def printed() -> dict[str, int] | None:
        logged = stack.compose("--profile", "lending", "logs", "--no-color", engine)
        lines = [line for line in logged.splitlines() if '{"requests"' in line]
        return json.loads(lines[-1][lines[-1].index("{") :]) if lines else None

    return eventually(f"{engine} has generated", printed, 120)


def test_an_engine_finds_what_an_engine_in_another_container_computed(lending: Stack) -> None:
    lending.compose("--profile", "lending", "up", "-d", "--no-build", "lender")
    first, second = (counts(lending, engine) for engine in ENGINES)
    assert first["requests"] == first["equal_requests"] == second["equal_requests"]
    assert second["hit_tokens"] > first["hit_tokens"]
    pool = lending.local_pool("lending-server")
    assert pool.free_blocks == pool.config.num_blocks - 1
