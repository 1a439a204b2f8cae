"""Transcripts of the client of a lender: what its steps and calls do upon what the lender does; see `FakeLender`.

A part of a transcript begins with `mapped` or `connected`, each with a lender of its own in epoch 7.

| command | what happens |
|---|---|
| `mapped [finishing] [timeout=0.2]` | a process has mapped the memory; it can finish its steps, or `failing` |
| `connected` | a process has connected, and has mapped nothing |
| `run 1 2 [epoch=9]` | steps of sessions 1 and 2 run, one after the other |
| `step a 1`, `done a` | a step of session 1 begins; it ends |
| `retry 1 [epoch=9]` | steps of session 1 are tried until one is refused, or until one of epoch 9 runs |
| `bind 1`, `unmap`, `map`, `close` | the process names a session; unmaps the memory, maps it again, or closes it |
| `write 5` | the process writes to the memory |
| `lender stop`, `lender start [soon]` | the lender dies; it is there again, at once or while the next command waits |
| `lender disconnect` | its connections end |
| `lender epoch 9`, `lender replace_memory` | the pool has another epoch; the lender has other memory |
| `fence 1 last=2 [live=1,2] [epoch=0]` | the lender sends a fence: sessions up to 2 have ended, except live ones |
| `answers bind SESSION_ENDED` | the answer to such requests from now on: `usual`, `none`, `fence`, or of `ERRORS` |
| `answer map` | the newest request of a kind, which had no answer, has the usual one |
| `wait bind 2` | until 2 requests of a kind have come; sessions and fences that these name are shown |
| `count fenced` | how many requests of a kind have come |
| `last 3` | the kinds of the newest 3 requests |
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Final

from kvpool.core.errors import AbortedError, KvpoolError, UnavailableError, WrongStateError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.core.specs.pool_config import HashScheme
from kvpool.lending.fence import StepTicket
from kvpool.lending.lender_client import LenderClient, LentMemory, connect_lender
from kvpool.v1 import lending_pb2
from support.core import config
from support.fake_lender import FakeLender, answer_frame
from support.transcripts import Played

SIZE_BYTES: Final = 4096
DECLARED: Final = DeclaredMemory(
    config(num_blocks=16, hash_scheme=HashScheme(none_hash=b"n" * 32)),
    SIZE_BYTES,
    (("dtype", "float32"), ("model", "m")),
)
ERRORS: Final[dict[str, KvpoolError]] = {
    "SESSION_ENDED": AbortedError("SESSION_ENDED", "it has ended"),
    "NOT_READY": AbortedError("NOT_READY", "no epoch is open"),
    "LAYOUT_DIFFERS": WrongStateError("LAYOUT_DIFFERS", "another engine laid it out"),
    "FORMING": UnavailableError("FORMING", "not all ranks are there", retry_seconds=0.1),
}


FENCE_AND_BOUND: Final = answer_frame(
    fence=lending_pb2.LendFence(fence_sequence=1, epoch=7, last_session_number=1)
) + answer_frame(bound=lending_pb2.Bound())
"""A fence that excludes session 1, then the answer to a request."""


def lease(number: int, epoch: int = 7) -> TableLease:
    """A lease of a session."""
    return TableLease(epoch, SessionNumber(number))


def _fail() -> None:
    raise RuntimeError("an error of the device")


@contextmanager
def fake_lender() -> Iterator[FakeLender]:
    """A lender in a folder whose path is short, as the address of a socket is limited."""
    with TemporaryDirectory() as folder:
        lender = FakeLender(Path(folder), SIZE_BYTES)
        yield lender
        lender.stop()


class LenderTranscript(Played):
    """A lender and the process of an engine."""

    fake: FakeLender
    client: LenderClient
    memory: LentMemory
    _bind: Callable[[TableLease], None]

    def __init__(self, opened: ExitStack) -> None:
        """Closes what is open with `opened`."""
        super().__init__()
        self._opened = opened
        self._tickets: dict[str, StepTicket] = {}

    def _do_connected(self, timeout: str = "30") -> None:
        self._opened.close()
        self.fake = self._opened.enter_context(fake_lender())
        self.client = connect_lender(self.fake.address, "m", timeout_seconds=float(timeout))
        self._opened.callback(self.client.close)
        self._bind = self.client.bind

    def _do_mapped(self, how: str = "", timeout: str = "30") -> None:
        self._do_connected(timeout)
        self._tickets = {}
        finish = {"finishing": self._finish, "failing": _fail}.get(how)
        self.memory = self.client.map(DECLARED, 10.0, finish_steps=finish)
        self._bind = self.memory.bind

    def _finish(self) -> None:
        for ticket in self._tickets.values():
            ticket.done()

    def _do_run(self, *sessions: str, epoch: str = "7") -> None:
        for session in sessions:
            self.memory.step(lease(int(session), int(epoch))).done()

    def _do_step(self, name: str, session: str) -> None:
        self._tickets[name] = self.memory.step(lease(int(session)))

    def _do_done(self, name: str) -> None:
        self._tickets[name].done()

    def _do_retry(self, session: str, epoch: str = "") -> None:
        while True:
            try:
                self._do_run(session, epoch=epoch or "7")
            except KvpoolError:
                if not epoch:
                    raise
            else:
                if epoch:
                    return

    def _do_bind(self, session: str) -> None:
        self._bind(lease(int(session)))

    def _do_unmap(self) -> None:
        self.memory.unmap()

    def _do_map(self) -> None:
        self.memory.map_again()

    def _do_close(self) -> None:
        self.memory.close()

    def _do_write(self, value: str) -> None:
        self.memory.buffer[0] = int(value)

    def _do_lender(self, what: str, value: str = "") -> None:
        match what:
            case "epoch":
                self.fake.epoch = int(value)
            case "start" if value:
                Timer(0.1, self.fake.start).start()
            case _:
                getattr(self.fake, what)()

    def _do_fence(self, sequence: str, last: str, live: str = "", epoch: str = "") -> None:
        sessions = (int(each) for each in live.split(",") if each)
        self.fake.fence(int(sequence), *sessions, last=int(last), epoch=int(epoch) if epoch else None)

    def _do_answers(self, kind: str, answer: str) -> None:
        if answer == "usual":
            del self.fake.answers[kind]
        else:
            self.fake.answers[kind] = FENCE_AND_BOUND if answer == "fence" else ERRORS.get(answer)

    def _do_answer(self, kind: str) -> None:
        self.fake.answer_last(kind)

    def _do_wait(self, kind: str, count: str = "1") -> None:
        requests = self.fake.wait_for(kind, int(count))[: int(count)]  # others may follow
        if kind == "bind":
            named = sorted((request.epoch, request.session_number) for request in requests)
            self.lines.append(f"bind: {' '.join(f'{number} in {epoch}' for epoch, number in named)}")
        if kind == "fenced":
            self.lines.append(f"fenced: {' '.join(str(request.fence_sequence) for request in requests)}")

    def _do_count(self, kind: str) -> None:
        self.lines.append(f"{kind}: {self.fake.count(kind)} times")

    def _do_last(self, count: str) -> None:
        self.lines.append(" ".join(kind for kind, _ in self.fake.requests[-int(count) :]))
