"""The ranks' side of the link to schedulers: rank 0 listens on a unix socket and runs steps in order of arrival.

1. One connection is one session. When it ends, the ranks forget the session's requests.
2. Steps of all sessions run one at a time. A scheduler waits for the answer before it sends the next step.
3. Messages are pickled values, so clients must know the authkey, and only the owner may access the socket.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, TypeAlias

from examples.reference_engine.step import StepInput, StepOutput
from kvpool.core.errors import KvpoolError

_Pipe: TypeAlias = "Connection[Any, Any]"


class StepServer:
    """Rank 0's side of the link."""

    def __init__(self, path: Path, authkey: bytes) -> None:
        """Starts to listen.

        Args:
            path: Path of the socket; must not exist.
            authkey: Shared secret of the schedulers.
        """
        umask = os.umask(0o177)
        try:
            self._listener = Listener(str(path), "AF_UNIX", authkey=authkey)
        finally:
            os.umask(umask)
        self._steps: queue.SimpleQueue[tuple[_Pipe, StepInput | None] | None] = queue.SimpleQueue()
        self._stopping = False
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, execute: Callable[[StepInput], list[int]], end_session: Callable[[str], object]) -> None:
        """Runs steps until `stop`, then closes the socket.

        Args:
            execute: Runs a step; raises KvpoolError if the step must not run.
            end_session: Called with the name of each session that ends.
        """
        sessions: dict[_Pipe, str] = {}
        with self._listener:
            self._serve(sessions, execute, end_session)

    def stop(self) -> None:
        """Makes `serve` return after the steps that have arrived. Thread-safe."""
        self._stopping = True
        self._steps.put(None)

    def _serve(
        self,
        sessions: dict[_Pipe, str],
        execute: Callable[[StepInput], list[int]],
        end_session: Callable[[str], object],
    ) -> None:
        while (item := self._steps.get()) is not None:
            pipe, step = item
            if step is None:
                if pipe in sessions:
                    end_session(sessions.pop(pipe))
                continue
            sessions[pipe] = step.session
            try:
                output = StepOutput(execute(step))
            except KvpoolError as error:
                output = StepOutput(refusal=(error.reason, str(error)))
            with contextlib.suppress(OSError):  # the client left while its step ran; `_receive` notices too
                pipe.send(output)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                pipe = self._listener.accept()
            except (AuthenticationError, EOFError, OSError):  # wrong authkey, or the client left at once
                continue
            threading.Thread(target=self._receive, args=(pipe,), daemon=True).start()

    def _receive(self, pipe: _Pipe) -> None:
        try:
            while True:
                self._steps.put((pipe, pipe.recv()))
        except (EOFError, OSError):
            self._steps.put((pipe, None))
