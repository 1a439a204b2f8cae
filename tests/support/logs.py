"""The log events of kvpool, read from the logging calls in its source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from support.paths import ROOT

_METHODS: Final = {level: level for level in ("debug", "info", "warning", "error", "critical")} | {"exception": "error"}
_WORKER: Final = ("pool", "rank")
"""Fields that `WorkerLog` and `RankLink` give the events of a rank."""
_SESSION: Final = ("pool", "session", "client", "epoch")


@dataclass(slots=True)
class Event:
    """An event: its calls have the same message and logger.

    Attributes:
        levels: In lower case; empty if a variable decides.
        fields: All that a call gives.
    """

    levels: set[str]
    fields: set[str]


@cache
def logged_events() -> dict[tuple[str, str], Event]:
    """Returns all events by logger and message, in the order of the source."""
    events: dict[tuple[str, str], Event] = {}
    for top in ("server", "proto", "gpu_worker", "client"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for logger, call, scope in _calls_of(ast.parse(path.read_text(encoding="utf-8"))):
                message, level, fields = _read(call, scope, f"{path.name}:{call.lineno}")
                event = events.setdefault((logger, message), Event(set(), set()))
                event.levels |= level
                event.fields |= fields
    return events


def _calls_of(tree: ast.Module) -> Iterator[tuple[str, ast.Call, ast.AST]]:
    """Yields logger, call and function of each logging call."""
    logger = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node).startswith("_log = logging.getLogger("):
            assert isinstance(node.value, ast.Call)
            logger = ast.literal_eval(node.value.args[0])
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_log."):
                    yield logger, node, function


def _read(call: ast.Call, scope: ast.AST, where: str) -> tuple[str, set[str], set[str]]:
    """Returns message, levels and fields of a call."""
    assert isinstance(call.func, ast.Attribute)
    has_level = call.func.attr == "log"
    message = call.args[1 if has_level else 0]
    assert isinstance(message, ast.Constant), f"{where}: the message is not a fixed phrase"
    assert len(call.args) == (2 if has_level else 1), f"{where}: variable parts belong in extra"
    extra = next((keyword.value for keyword in call.keywords if keyword.arg == "extra"), None)
    levels = set() if has_level else {_METHODS[call.func.attr]}
    return str(message.value), levels, set(_keys(extra, scope)) if extra else set()


def _keys(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """Yields the names of the fields in the `extra` argument."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                yield from _keys(value, scope)
            else:
                assert isinstance(key, ast.Constant)
                yield str(key.value)
    elif isinstance(node, ast.Attribute) and node.attr.lstrip("_") == "rank_fields":
        yield from _WORKER
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "session_fields":
        yield from _SESSION
    elif isinstance(node, ast.Name):
        values = [
            each.value
            for each in ast.walk(scope)
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == node.id
        ]
        assert values, f"{node.id} is not assigned in the same function"
        for value in values:
            yield from _keys(value, scope)
    else:
        raise AssertionError(f"cannot determine the fields of {ast.unparse(node)}")
