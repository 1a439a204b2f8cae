"""Shows kvpool's log events in the log of vLLM's processes, whose handlers serve loggers of vLLM alone."""

import copy
import logging

from kvpool.wire.log_fields import FIELDS, fields_of, format_fields

_FORMAT = "%(levelname)s %(name)s: %(message)s"
"""Of a program that uses vLLM without its logging."""


def log_with_vllm() -> None:
    """Gives kvpool's events the level and the handlers of vLLM's, unless the program configures their logging."""
    own, engine = logging.getLogger("kvpool"), logging.getLogger("vllm")
    if own.handlers or logging.getLogger().handlers:
        return
    own.setLevel(engine.getEffectiveLevel())
    for handler in map(copy.copy, engine.handlers or [logging.StreamHandler()]):
        handler.setFormatter(_WithFields(handler.formatter or logging.Formatter(_FORMAT)))
        own.addHandler(handler)


class _WithFields(logging.Formatter):
    """Formats as vLLM does, with the fields of the event after the message."""

    def __init__(self, engine: logging.Formatter) -> None:
        super().__init__()
        self._engine = engine

    def format(self, record: logging.LogRecord) -> str:
        shown = copy.copy(record)
        fields = [field for field in fields_of(record) if field[0] in FIELDS]  # vLLM adds some to each record
        shown.msg, shown.args = record.getMessage() + format_fields(fields), ()
        return self._engine.format(shown)
