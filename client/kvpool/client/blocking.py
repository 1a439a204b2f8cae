"""Runs coroutines that never suspend, so that synchronous and asyncio clients share them.

1. A coroutine of a client, a session or a transport waits only inside the I/O methods of its transport.
2. The transport of a synchronous client blocks in these methods. Its coroutines therefore run to their end in one go,
   without an event loop.
3. A `KvpoolError` leaves without the frames of the coroutines that it passed: it describes what the server or the
   client refused, and about twenty frames would hide the caller's line. Any other error is a bug and keeps them.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvpool.core.errors import KvpoolError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine that does not suspend, and returns its result.

    Raises:
        KvpoolError: As the coroutine; see rule 3.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    except KvpoolError as error:
        raise error.with_traceback(None) from error.__cause__
    coroutine.close()
    raise RuntimeError("a transport of a synchronous client suspended")


def blocking(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> Callable[Concatenate[Any, _P], _T]:
    """Makes the synchronous form of a method, with the same parameters."""

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:  # noqa: ANN401 - any class with the method
        return run(method(self, *args, **kwargs))

    return call


def iterate(generator: AsyncGenerator[_T]) -> Iterator[_T]:
    """Makes an iterator of an asynchronous generator that does not suspend."""
    try:
        while True:
            try:
                item = run(anext(generator))
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(generator.aclose())
