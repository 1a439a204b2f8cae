"""Logging of the long-running commands: lines for people, or one JSON object per line.

Everything goes to stderr, including warnings, logs of other libraries and uncaught exceptions.
"""

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
from kvpool.cli.text import clean
from kvpool.wire.log_fields import fields_of, format_fields
from kvpool.wire.log_queue import LogQueue

_log = logging.getLogger("kvpool.cli")

log_options: Final = together(
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Minimum severity of logged messages.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["console", "json"]),
        default="console",
        help="Lines for people, or one JSON object per line.",
    ),
)
"""Adds the options of `start_logging`."""


def start_logging(level: str, log_format: str) -> LogQueue:
    """Logs messages of at least this level to stderr, in a thread.

    Args:
        level: Name of the level.
        log_format: "console" or "json".

    Returns:
        The queue of lines to write.
    """
    handler = LogQueue(JsonLines() if log_format == "json" else ConsoleLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc").setLevel(max(logging.getLogger().level, logging.INFO))  # its debug messages are too many
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_interest)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    return handler


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC is about more than a client that went away: it logs some of them as errors."""
    kind = record.exc_info[0] if record.exc_info else None
    return not kind or kind.__name__ not in ("CancelledError", "ExecuteBatchError")


def report(error: click.ClickException) -> bool:
    """Logs the error that ends a command, if the log is JSON; returns False if the caller must print the error."""
    if not any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers):
        return False
    _log.critical("command failed", extra={"error": error.format_message()})
    return True


class ConsoleLines(logging.Formatter):
    """Formats time, level, logger, message, then the fields as key=value, with human-readable sizes."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        """Formats the line without a traceback."""
        return clean(super().formatMessage(record)) + format_fields(fields_of(record))

    def formatException(self, ei: Any) -> str:  # noqa: ANN401, N802 - as in logging
        """Formats a traceback, whose last lines may quote what others sent."""
        return "\n".join(map(clean, super().formatException(ei).splitlines()))


class JsonLines(JsonFormatter):
    """Formats one JSON object: time, level, logger, message, the fields, and the traceback of an exception."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"},
        )

    def add_fields(self, log_data: LogData, record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Orders the entries: the time first, then the fields."""
        moment = datetime.fromtimestamp(record.created, UTC)
        log_data["time"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        super().add_fields(log_data, record, message_dict)
        for name, value in fields_of(record):
            log_data[name] = log_data.pop(name, value)
        for name in ("exception", "stack"):
            if name in log_data:
                log_data[name] = log_data.pop(name)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value
    if error is not None:
        _log_uncaught(arguments.exc_type, error, arguments.exc_traceback)
