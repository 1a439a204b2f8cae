"""Makes a chosen function of the core fail, as a bug in it would: a tracer raises an error within it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Literal

import kvpool.core.state

_CORE: Final = str(Path(kvpool.core.state.__file__).parent)
Moment = Literal["call", "return"]


class InjectedError(Exception):
    """The bug."""


def called_functions(run: Callable[[], object]) -> list[CodeType]:
    """Runs something; returns the functions of the core that it calls, in the order of their first call."""
    found: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_CORE):
            found[frame.f_code] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(found)


@contextmanager
def failing(function: CodeType, moment: Moment) -> Iterator[None]:
    """Makes the first call of a function raise InjectedError, before it does anything or after it did everything."""
    is_armed = True

    def fail(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal is_armed
        if not is_armed or frame.f_code is not function:
            return None
        if event == moment:
            is_armed = False
            raise InjectedError
        return fail

    before = sys.gettrace()
    sys.settrace(fail)
    try:
        yield
    finally:
        sys.settrace(before)
