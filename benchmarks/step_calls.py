"""Counts the function calls of one step in the client and in the server: python -m benchmarks.step_calls --help.

Counts are the same on every machine, so they show a step that became dearer where times are noise. The server runs in
a thread of this process, and what that thread calls is the server's; all else is the client's. Calls of the standard
library and of gRPC do not count, nor do comprehensions, which are functions in some versions of Python only.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, PoolName, Session, connect
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.server.journal.config import JournalConfig

ACCEPTED: Final = Path(__file__).with_suffix(".json")
"""The counts that were accepted last."""
TOLERANCE: Final = 1.05
"""A step may have this many times the accepted calls: background tasks of the server run meanwhile."""
_ROOT: Final = f"{Path(__file__).parents[1]}/"
_ROUNDS: Final = 50
_BLOCK_TOKENS: Final = 16
_NUM_REQUESTS: Final = 64

Function = tuple[str, str]
"""A file and the qualified name of a function in it."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one step.

    Attributes:
        client: Functions of the client's side, in the order of their first call, with their number of calls.
        server: The same of the server's side.
    """

    client: Counter[Function]
    server: Counter[Function]

    def figures(self) -> dict[str, int]:
        """Calls per step on each side, and functions and files on both.

        Calls that only some steps make do not count: they are of background tasks, and of turns and reads that are
        split, which are more on a slow machine.
        """
        client, server = (
            {function: count // _ROUNDS for function, count in calls.items() if count >= _ROUNDS}
            for calls in (self.client, self.server)
        )
        functions = client.keys() | server.keys()
        return {
            "client_calls": sum(client.values()),
            "server_calls": sum(server.values()),
            "functions": len(functions),
            "files": len({file for file, _ in functions}),
        }


class _Recorder:
    """Records calls of this repository's functions, by side; made in the thread of the server."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls = Calls(Counter(), Counter())
        self._server_thread = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(_ROOT):
            return
        name = code.co_qualname.rpartition(".")[2]
        if name.startswith("<") or "/.venv" in code.co_filename or "_pb2" in code.co_filename:
            return
        side = self.calls.server if threading.get_ident() == self._server_thread else self.calls.client
        side[code.co_filename.removeprefix(_ROOT), code.co_qualname] += 1


def count_calls(step: str, *, with_journal: bool = False) -> Calls:
    """Counts the calls of `_ROUNDS` equal steps.

    Args:
        step: Name of the step, one of `STEPS`.
        with_journal: Whether the server has a journal.
    """
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder), with_journal=with_journal) as served:
        address, recorder = served
        threading.setprofile(recorder)
        try:
            with connect(address) as client:
                groups = (KVCacheGroup(FullAttentionSpec(_BLOCK_TOKENS), ("layer.0",)),)
                client.create_pool(PoolConfig(PoolName("m"), 8192, 8192, groups))
                with client.open_session("m") as session:
                    send = STEPS[step](session)
                    for _ in range(3):
                        send()
                    _record(recorder, send)
        finally:
            threading.setprofile(None)
    return recorder.calls


def _record(recorder: _Recorder, send: Callable[[], object]) -> None:
    sys.setprofile(recorder)
    recorder.is_on = True
    try:
        for _ in range(_ROUNDS):
            send()
    finally:
        recorder.is_on = False
        sys.setprofile(None)


@contextmanager
def _server(folder: Path, *, with_journal: bool) -> Iterator[tuple[str, _Recorder]]:
    """Runs a server in a thread; yields its address, and the recorder of its calls."""
    loop = asyncio.new_event_loop()
    config = ServerConfig(
        (f"unix:{folder}/socket",), journal=JournalConfig(f"{folder}/journal" if with_journal else "")
    )
    started: Future[tuple[str, _Recorder, asyncio.Event]] = Future()

    async def serve() -> None:
        server, end, recorder = Server(config), asyncio.Event(), _Recorder()
        (address,) = await server.start()
        sys.setprofile(recorder)
        started.set_result((address, recorder, end))
        await end.wait()
        sys.setprofile(None)
        await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    address, recorder, end = started.result()
    try:
        yield address, recorder
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def _empty(session: Session) -> Callable[[], object]:
    """A step that changes nothing, but is sent."""
    request = session.request("r", range(_BLOCK_TOKENS))
    session.allocate_slots(request, _BLOCK_TOKENS)
    return lambda: session.cache_blocks(request, 0)


def _allocation(session: Session) -> Callable[[], object]:
    """One `allocate_slots` that takes a block."""
    request = session.request("r", range(_BLOCK_TOKENS))
    session.allocate_slots(request, _BLOCK_TOKENS)

    def send() -> None:
        request.append(range(_BLOCK_TOKENS))
        session.allocate_slots(request, _BLOCK_TOKENS)

    return send


def _decodes(session: Session) -> Callable[[], object]:
    """A decode of many requests, of which each takes a block."""
    requests = [session.request(f"r{i}", range(i, i + _BLOCK_TOKENS)) for i in range(_NUM_REQUESTS)]
    for request in requests:
        session.allocate_slots(request, _BLOCK_TOKENS)

    def send() -> None:
        with session.step() as step:
            for request in requests:
                request.append(range(_BLOCK_TOKENS))
                step.allocate_slots(request, _BLOCK_TOKENS)

    return send


STEPS: Final[dict[str, Callable[[Session], Callable[[], object]]]] = {
    "empty": _empty,
    "allocation": _allocation,
    f"decode_{_NUM_REQUESTS}": _decodes,
}
"""What is counted; each makes a function that sends one more step."""


def measure() -> dict[str, dict[str, int]]:
    """Figures of all steps, with and without a journal."""
    return {
        name + suffix: count_calls(name, with_journal=bool(suffix)).figures()
        for suffix in ("", "_journal")
        for name in STEPS
    }


def excess(found: dict[str, dict[str, int]], accepted: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What of a count is more than was accepted."""
    return [
        f"{step}: {figure} {value}, accepted {accepted[step][figure]}"
        for step, figures in found.items()
        for figure, value in figures.items()
        if value > TOLERANCE * accepted[step][figure] + 0.5
    ]


def main() -> int:
    """Runs from the command line; exits with 1 if a step has more calls than accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accept", action="store_true", help=f"write {ACCEPTED.name}; say in CHANGELOG.md why")
    parser.add_argument(
        "--way", choices=[*STEPS], help="print the functions of a step in the order of their first call"
    )
    options = parser.parse_args()
    if options.way:
        calls = count_calls(options.way, with_journal=True)
        for side, counts in (("client", calls.client), ("server", calls.server)):
            for (file, name), count in counts.items():
                print(f"{side} {count / _ROUNDS:6.1f}  {file}:{name}")  # noqa: T201
        return 0
    found = measure()
    if options.accept:
        ACCEPTED.write_text(json.dumps(found, indent=2) + "\n")
    more = excess(found, json.loads(ACCEPTED.read_text()))
    print(json.dumps(found, indent=2), *more, sep="\n")  # noqa: T201
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
