"""The asyncio client with blocking calls, so that a test is written once for both clients."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from kvpool.client import aio


class BlockingAio:
    """Calls an asyncio client in place of `Client` and `Session`. Its loop runs during calls only."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return self._blocking(method) if inspect.ismethod(method) else method

    def _blocking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            if inspect.isasyncgen(answer):
                return self._iterate(answer)
            if asyncio.iscoroutine(answer):
                answer = self._runner.run(answer)
            return BlockingAio(answer, self._runner) if isinstance(answer, aio.AsyncSession) else answer

        return call

    def _iterate(self, batches: Any) -> Iterator[Any]:
        try:
            while True:
                yield self._runner.run(anext(batches))
        finally:
            self._runner.run(batches.aclose())
