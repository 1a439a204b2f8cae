"""Formats of log records. tests/integration/test_logs.py tests the logs of whole processes."""

import asyncio
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import click
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # a C module without types

from kvpool.cli.logs import ConsoleLines, JsonLines, report, start_logging
from kvpool.wire.log_queue import LogQueue

Start: TypeAlias = Callable[[str, str], LogQueue]
Read: TypeAlias = Callable[[LogQueue], list[dict[str, Any]]]

MOMENT = 1795270405.789
"""2026-11-21, 14:13:25 UTC."""


def record(message: str = "pool ready", error: BaseException | None = None, **fields: object) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    made = logging.makeLogRecord({"name": "kvpool.server", "levelname": "INFO", "msg": message, "exc_info": exc_info})
    made.created, made.msecs = MOMENT, 789.0
    vars(made).update(fields)
    return made


def console(made: logging.LogRecord) -> str:
    """Returns the line without its local time."""
    line = ConsoleLines().format(made)
    assert line[10] == " "
    assert line[19:23] == ",789"
    return line[24:]


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines().format(made)
    assert "\n" not in line
    entry: dict[str, Any] = json.loads(line)
    return entry


def failure() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("no\nsuch thing")
    return caught.value


def test_console_lines_have_fields_in_order_and_readable_sizes() -> None:
    made = record(zone="b", bytes=3 * 2**29, area=1.5, epoch=2, absent_ranks=[1, 3], pool="m")
    assert console(made) == (
        'INFO kvpool.server: pool ready pool=m epoch=2 absent_ranks=1,3 bytes="1.5 GiB" area=1.5 zone=b'
    )
    assert console(record()) == "INFO kvpool.server: pool ready"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain-name/1", "plain-name/1"),
        ("größe", "größe"),
        ("two words", '"two words"'),
        ('a"b', '"a\\"b"'),
        ("a=b", '"a=b"'),
        ("", '""'),
        ("x\n2026-11-21 ERROR forged", '"x\\n2026-11-21 ERROR forged"'),
        ("\x1b[31mred", '"\\u001b[31mred"'),
    ],
)
def test_a_client_name_stays_on_its_line(value: str, written: str) -> None:
    assert console(record(client=value)) == f"INFO kvpool.server: pool ready client={written}"


def test_a_json_line_has_the_time_first_and_the_fields_in_order() -> None:
    entry = as_json(record(zone="b", bytes=3 * 2**29, epoch=2, absent_ranks=[1, 3], pool="m"))
    assert list(entry.items()) == [
        ("time", "2026-11-21T14:13:25.789Z"),
        ("level", "INFO"),
        ("logger", "kvpool.server"),
        ("message", "pool ready"),
        ("pool", "m"),
        ("epoch", 2),
        ("absent_ranks", [1, 3]),
        ("bytes", 3 * 2**29),
        ("zone", "b"),
    ]


def test_log_lines_of_libraries_are_json_objects_too() -> None:
    made = logging.makeLogRecord({"msg": "%s of %d", "args": ("one", 2)})
    assert as_json(made)["message"] == "one of 2"
    assert console(record("100% of it")) == "INFO kvpool.server: 100% of it"


def test_a_bug_is_one_record_with_its_traceback() -> None:
    entry = as_json(record("bug", failure(), method="Free"))
    assert list(entry)[-2:] == ["method", "exception"]
    assert entry["exception"].startswith("Traceback (most recent call last):\n")
    assert entry["exception"].endswith("RuntimeError: no\nsuch thing")
    first, *trace = console(record("bug", failure(), method="Free")).splitlines()
    assert (first, trace[0]) == ("INFO kvpool.server: bug method=Free", "Traceback (most recent call last):")


def test_messages_and_tracebacks_control_no_terminal() -> None:
    hostile = "a\x1b[2J\r\n\x9bb\u202e\u2028\ud800"
    assert console(record(hostile)) == "INFO kvpool.server: a?[2J???b???"
    error = RuntimeError(hostile)
    first, *trace = console(record("bug", error)).split("\n")
    assert first == "INFO kvpool.server: bug"
    assert all(line.isprintable() for line in trace)
    assert as_json(record(hostile, error))["message"] == hostile


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts logging; logging is restored afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def start(level: str, log_format: str) -> LogQueue:
        for handler in root.handlers[:]:
            root.removeHandler(handler)  # `force` would close pytest's handlers
        return start_logging(level, log_format)

    yield start
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level = before


@pytest.fixture
def entries(capfd: pytest.CaptureFixture[str]) -> Read:
    """A function that returns what was written to stderr since its last call."""

    def read(log: LogQueue) -> list[dict[str, Any]]:
        log.flush()
        return [json.loads(line) for line in capfd.readouterr().err.splitlines()]

    return read


def test_warnings_and_uncaught_exceptions_are_logged(started: Start, entries: Read) -> None:
    log = started("warning", "json")
    logging.getLogger("kvpool.server").info("session opened")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old way", DeprecationWarning, stacklevel=1)
    error = failure()
    sys.excepthook(type(error), error, error.__traceback__)
    threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
    warned, uncaught, in_thread = entries(log)
    assert (warned["logger"], "DeprecationWarning: old way" in warned["message"]) == ("py.warnings", True)
    assert (uncaught["level"], uncaught["message"]) == ("CRITICAL", "uncaught exception")
    assert uncaught["exception"] == in_thread["exception"]


def test_debug_level_does_not_apply_to_grpc(started: Start, entries: Read) -> None:
    log = started("debug", "json")
    logging.getLogger("grpc._cython.cygrpc").debug("Loaded running loop")
    logging.getLogger("grpc").warning("of use")
    logging.getLogger("kvpool.server").debug("call refused")
    assert [entry["message"] for entry in entries(log)] == ["of use", "call refused"]


def test_a_client_that_goes_away_is_no_error(started: Start, entries: Read) -> None:
    log = started("info", "json")
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    for kind in (asyncio.CancelledError, cygrpc.ExecuteBatchError, cygrpc.InternalError):
        error = kind()
        grpc_log.error("%s raised", kind.__name__, exc_info=(kind, error, None))
    grpc_log.error("without an exception")
    assert [entry["message"] for entry in entries(log)] == ["InternalError raised", "without an exception"]


def test_the_error_that_ends_a_command_is_logged_only_in_json(started: Start, entries: Read) -> None:
    error = click.ClickException("RANK_TAKEN: another process")
    log = started("info", "console")
    assert not report(error)
    assert entries(log) == []
    log = started("error", "json")
    assert report(error)
    (entry,) = entries(log)
    assert (entry["level"], entry["message"], entry["error"]) == ("CRITICAL", "command failed", error.message)
