"""How commands that run for long write their log: for people, or one JSON object a line.

Library code logs fixed phrases with what varies in `extra`; docs/logs.md lists both. Everything goes to stderr:
warnings, what other libraries log, and exceptions that nobody caught, too.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final

import click
from pythonjsonlogger.core import LogData
from pythonjsonlogger.json import JsonFormatter

from kvpool.cli.options import together
from kvpool.gpu_worker.status import format_bytes

FIELDS: Final = (
    *("pool", "session", "session_before", "client", "rank", "epoch", "memory", "reason", "error", "method"),
    *(
        "requests",
        "sessions",
        "ranks",
        "absent_ranks",
        "blocks",
        "planned_blocks",
        "buffers",
        "batches",
        "records",
        "bytes",
        "seconds",
    ),
    *("calls", "tokens", "token_name", "peer", "path"),
    *("device", "host", "pid", "server", "address", "addresses", "faults"),
)
"""All fields of our own events, in the order in which they are written."""

_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ORDER: Final = {name: place for place, name in enumerate(FIELDS)}

_log = logging.getLogger("kvpool.cli")

log_options: Final = together(
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Least severe messages to log.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["console", "json"]),
        default="console",
        show_default=True,
        help="Lines for people, or a JSON object a line.",
    ),
)
"""Gives a command the options that `start_logging` takes."""


def start_logging(level: str, log_format: str) -> None:
    """Has everything of this level and above written to stderr, from now on.

    Args:
        level: Its name.
        log_format: "console" or "json".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else ConsoleLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc").setLevel(max(logging.getLogger().level, logging.INFO))  # its debug drowns all else
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def report(error: click.ClickException) -> bool:
    """Logs why a command ends, if it logs JSON; returns whether it did, else the error is still to be shown."""
    if not any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers):
        return False
    _log.critical("command failed", extra={"error": error.format_message()})
    return True


class ConsoleLines(logging.Formatter):
    """Time, level, logger, message, then the fields as key=value; sizes for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging names it
        """Writes the line, what a traceback needs apart."""
        fields = (f" {name}={_for_people(name, value)}" for name, value in _fields(vars(record)))
        return super().formatMessage(record) + "".join(fields)


class JsonLines(JsonFormatter):
    """One object a line: time, level, logger, message, the fields, and the traceback of an exception."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"},
        )

    def add_fields(self, log_data: LogData, record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Puts the time first and the fields in order."""
        moment = datetime.fromtimestamp(record.created, UTC)
        log_data["time"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        super().add_fields(log_data, record, message_dict)
        for name, value in _fields(vars(record)):
            log_data[name] = log_data.pop(name, value)
        for name in ("exception", "stack"):
            if name in log_data:
                log_data[name] = log_data.pop(name)


def _fields(attributes: dict[str, object]) -> list[tuple[str, object]]:
    """What a record holds beside logging's own, our own fields first."""
    extras = [(name, value) for name, value in attributes.items() if name not in _OWN]
    return sorted(extras, key=lambda field: (_ORDER.get(field[0], len(_ORDER)), field[0]))


def _for_people(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        text = format_bytes(value)
    elif isinstance(value, list | tuple):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    if text and text.isprintable() and not set(text) & set(' "='):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())  # a line stays one, whatever a client calls itself


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value
    if error is not None:
        _log_uncaught(arguments.exc_type, error, arguments.exc_traceback)
