"""Every event that the code can log is in docs/reference/logs.md, and every event there is in the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.wire.log_fields import FIELDS
from support.logs import documented_events, documented_fields
from support.paths import ROOT

FILES = [path for top in ("proto", "server", "client", "gpu_worker") for path in sorted((ROOT / top).rglob("*.py"))]
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "critical": "critical"}
METHODS = {**LEVELS, "exception": "error"}
WORKER = {"pool", "rank"}
"""Fields that `WorkerLog` and `RankLink` give the events of a rank."""


class Logged:
    """A logging call in the source."""

    def __init__(self, logger: str, call: ast.Call, scope: ast.AST, where: str) -> None:
        assert isinstance(call.func, ast.Attribute)
        self.logger, self.where = logger, f"{where}:{call.lineno}"
        has_level = call.func.attr == "log"
        message = call.args[1 if has_level else 0]
        assert isinstance(message, ast.Constant), f"{self.where}: the message is not a fixed phrase"
        assert len(call.args) == (2 if has_level else 1), f"{self.where}: variable parts belong in extra"
        self.message = str(message.value)
        self.level = None if has_level else METHODS[call.func.attr]
        extra = next((keyword.value for keyword in call.keywords if keyword.arg == "extra"), None)
        self.fields = set(keys(extra, scope)) if extra else set()


def keys(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """Names of the fields in the `extra` argument."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                yield from keys(value, scope)
            else:
                assert isinstance(key, ast.Constant)
                yield str(key.value)
    elif isinstance(node, ast.Attribute) and node.attr.lstrip("_") == "rank_fields":
        yield from WORKER
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"session_fields", "ended_fields"}:
        yield from ("pool", "session", "client", "epoch")
    elif isinstance(node, ast.Name):
        values = [
            each.value
            for each in ast.walk(scope)
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == node.id
        ]
        assert values, f"{node.id} is not assigned in the same function"
        for value in values:
            yield from keys(value, scope)
    else:
        raise AssertionError(f"cannot determine the fields of {ast.unparse(node)}")


def calls_of(path: Path) -> Iterator[Logged]:
    tree = ast.parse(path.read_text())
    logger = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node).startswith("_log = logging.getLogger("):
            assert isinstance(node.value, ast.Call)
            logger = ast.literal_eval(node.value.args[0])
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_log."):
                yield Logged(logger, node, function, path.name)


@pytest.fixture(scope="module")
def logged() -> list[Logged]:
    found = [call for path in FILES for call in calls_of(path)]
    assert len(found) > 30
    return found


def test_logged_events_are_documented(logged: list[Logged]) -> None:
    events = documented_events()
    for call in logged:
        event = events.get((call.logger, call.message))
        assert event, f"{call.where}: {call.message!r} of {call.logger} is not in docs/reference/logs.md"
        assert call.level is None or call.level in event.levels, call.where
        assert call.fields <= event.fields, call.where


def test_documented_events_are_logged(logged: list[Logged]) -> None:
    for event in documented_events().values():
        calls = [call for call in logged if (call.logger, call.message) == (event.logger, event.message)]
        assert calls, f"{event.message!r} of {event.logger} is not in the code"
        assert set().union(*(call.fields for call in calls)) == event.fields, event.message
        if all(call.level for call in calls):
            assert {call.level for call in calls} == event.levels, event.message


def test_documented_fields_are_those_of_the_formatter() -> None:
    used = set().union(*(event.fields for event in documented_events().values()))
    assert used == documented_fields() == set(FIELDS)
    assert len(FIELDS) == len(set(FIELDS))
