"""Engines killed in the middle of generating, and services killed under them: whole processes, and SIGKILL.

Tokens are compared with what vLLM by itself answers, and their logprobs to the last bit: blocks that somebody else was
given meanwhile would show. What a user sees of an engine that cannot go on is held here, too: its log.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from signal import SIGTERM
from typing import TypeAlias

import pytest

from engine.followed import FollowedEngine, followed
from engine.models import LLAMA, write_model
from engine.pairs import SCHEDULER, Engine
from engine.results import NewTokens, Script
from engine.service import service
from kvpool.client import PoolInfo, connect
from support.etcd import EtcdCluster, needs_etcd
from support.pair import Pair

pytestmark = [pytest.mark.complete, pytest.mark.timeout(600)]  # engines start one after the other
EARLY, LATER, LATE = 40, 120, 180
"""Steps before which engines pause: eight requests run; as many more, with their prefixes; the first have ended."""
SOME_STEPS = 10
ENGINE = Engine(LLAMA, 100, (), {"max_num_seqs": 16})
POOL = "deaths"
Answers: TypeAlias = dict[str, NewTokens]


class Scripts:
    """What engines of one model are to do, which is always the same."""

    def __init__(self, folder: Path) -> None:
        self._model = folder / "model"
        write_model(ENGINE.model, self._model)

    def plain(self, **options: object) -> Script:
        """For vLLM as it is, with more arguments of `vllm.LLM`."""
        llm = {**ENGINE.specification(self._model)["llm"], **options}
        return {"llm": llm, "workload": "conversations", "pauses": []}

    def pooled(self, address: str, *pauses: int, memory_id: str = "", **options: object) -> Script:
        """For an engine on a service, which waits before some steps. With a memory id, others may share its memory."""
        settings = {"address": address, "pool": POOL, "deadline_seconds": 30.0, "memory_id": memory_id}
        script = self.plain(scheduler_cls=SCHEDULER, additional_config={"kvpool": settings}, **options)
        return {**script, "pauses": list(pauses)}


class Plain:
    """vLLM by itself, at work on the same."""

    def __init__(self, engine: FollowedEngine) -> None:
        self._engine = engine

    @cached_property
    def answers(self) -> Answers:
        """All of them, in full."""
        assert self._engine.end() == 0, self._engine.log
        return self._engine.answers


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def plain(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with followed(scripts.plain(), tmp_path_factory.mktemp("plain") / "engine") as engine:
        yield Plain(engine)


_ERROR = re.compile(r"^(?:\[rank0\]: |\(EngineCore pid=\d+\) ERROR [^]]*\] )?((?:\w+\.)+\w+Error: .*)$", re.MULTILINE)
"""What a traceback ends with, of a process or of its engine's core."""
NO_SESSION = "kvpool.client.NotFoundError: session_id: no such session"
RESTART = "restart the engine"
CORE_DIED = (
    "vllm.v1.engine.exceptions.EngineDeadError: "
    "EngineCore encountered an issue. See stack trace (above) for the root cause."
)


def _pool(address: str) -> PoolInfo:
    with connect(address) as client:
        return client.get_pool(POOL)


def _assert_begins_as(expected: Answers, answers: Answers) -> None:
    """What was answered so far is what the expected answers begin with."""
    for request, answer in answers.items():
        beginning = expected[request]["tokens"][: len(answer["tokens"])]
        assert (request, answer) == (request, {**expected[request], "tokens": beginning})


def test_a_killed_engine_leaves_its_blocks_and_nothing_cached_to_the_next(
    plain: Plain, scripts: Scripts, address: str, tmp_path: Path
) -> None:
    with followed(scripts.pooled(address, LATE), tmp_path / "first") as first:
        first.read_steps(EARLY)  # and it goes on while it is killed
        held = _pool(address)
        assert held.free_blocks < ENGINE.num_blocks - 1
        assert held.cached_blocks > 0
        first.kill()
        _assert_begins_as(plain.answers, first.answers)
    with followed(scripts.pooled(address, 0), tmp_path / "second") as second:
        second.read_until_it_pauses()
        found = _pool(address)
        assert found.epoch > held.epoch
        assert (found.sessions, found.requests, found.cached_blocks) == (1, 0, 0)
        assert (found.free_blocks, found.quarantined_blocks) == (ENGINE.num_blocks - 1, 0)
        second.go_on()
        assert second.end() == 0, second.log
    assert second.answers == plain.answers
    left = _pool(address)
    assert (left.sessions, left.requests, left.free_blocks) == (0, 0, ENGINE.num_blocks - 1)


@needs_etcd
def test_an_engine_continues_with_a_standby(plain: Plain, scripts: Scripts, tmp_path: Path) -> None:
    """The primary is killed between two steps, hands over while the engine steps, and is paused."""
    etcd = EtcdCluster(tmp_path / "etcd", 1)
    # A standby stays in sync while engines load and use all processors.
    pair = Pair(tmp_path, f"etcd://{etcd.endpoints[0]}/deaths", ("--standby-timeout-seconds", "60"))
    with (
        ExitStack() as stack,
        followed(scripts.pooled(pair.seeds, EARLY, LATER, LATE), tmp_path / "engine") as engine,
    ):
        stack.callback(etcd.kill)
        stack.callback(pair.close)
        pair.start()
        engine.read_until_it_pauses()
        begun = _pool(pair.seeds)
        pair.wait_in_sync()
        killed = pair.primary()
        killed.kill()
        engine.go_on()

        engine.read_until_it_pauses()
        killed.start()
        pair.wait_in_sync()
        engine.go_on()
        engine.read_steps(SOME_STEPS)
        pair.primary().process.signal(SIGTERM)  # hands over

        engine.read_until_it_pauses()
        assert engine.num_steps == LATE
        pair.other(pair.primary()).start()
        pair.wait_in_sync()
        pair.primary().pause()
        engine.go_on()

        assert engine.end() == 0, engine.log
        ended = _pool(pair.seeds)
    assert engine.answers == plain.answers
    assert any(answer["num_cached_tokens"] for answer in engine.answers.values())
    assert (ended.epoch, ended.sessions, ended.free_blocks) == (begun.epoch, 0, ENGINE.num_blocks - 1)


def test_a_separate_core_logs_why_it_stops_and_its_engine_reports_it(
    plain: Plain, scripts: Scripts, tmp_path: Path
) -> None:
    """As users run it: the core logs the reason, and again as its process ends, if that still comes to it.

    What a core batches depends on when it receives requests, so that only tokens can be compared.
    """
    with (
        service(tmp_path) as server,
        followed(
            scripts.pooled(server.address, SOME_STEPS, memory_id="gpu0"), tmp_path / "engine", core_apart=True
        ) as engine,
    ):
        engine.read_until_it_pauses()
        server.restart()
        engine.go_on()
        assert engine.end() == 1
    errors = _ERROR.findall(engine.log)
    assert errors[0] == NO_SESSION
    assert {*errors} == {NO_SESSION, CORE_DIED}
    assert errors.count(CORE_DIED) == 1
    assert RESTART in engine.log
    assert engine.num_steps >= SOME_STEPS
    for request, answer in engine.answers.items():
        tokens = _tokens(answer)
        assert tokens
        assert tokens == _tokens(plain.answers[request])[: len(tokens)]


def _tokens(answer: NewTokens) -> list[int]:
    return [token for token, _ in answer["tokens"]]
