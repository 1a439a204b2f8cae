"""Sends many inputs to one server's objects, and checks each answer against the comments in the .proto files.

1. A call ends with a code that its comment names, with ErrorInfo, and never with INTERNAL.
2. A refusal changes nothing. A fingerprint is compared each time, the whole visible state from time to time.
3. The integrity checks hold, and the memory does not grow with the number of inputs.
"""

import asyncio
import resource
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random
from typing import Final

import grpc
from google.protobuf.message import DecodeError, Message

from fuzz.contract import METHODS, Method
from fuzz.grammar import Grammar
from fuzz.grammar_ranks import RankGrammar
from fuzz.mutations import mutate_bytes, mutate_fields
from fuzz.served import Ended, OpenCall, Served
from support.state import DrivenState

CHECK_EVERY: Final = 500
"""Inputs between two integrity checks, each with a comparison of the whole visible state."""
_OPEN_CALLS: Final = 8
_KEPT_INPUTS: Final = 30
_ROUNDS: Final = 8
"""Turns of the event loop after which a waiting call has done its work."""

_WEIGHTS: Final = {
    "AllocatorService.Schedule": 30,
    "AllocatorService.AllocateSlots": 12,
    "WorkerService.Join": 12,
    "AllocatorService.GetComputedBlocks": 6,
    "AllocatorService.OpenSession": 6,
    "AllocatorService.Free": 4,
    "AllocatorService.CreatePool": 3,
    "AllocatorService.CloseSession": 1,
    "AllocatorService.WaitUntilReady": 1,
    "AdminService.Undrain": 3,
    "AdminService.EvictSession": 0.5,
    "AdminService.RemovePool": 2,
    "AdminService.Drain": 0.5,
}


class Kind(Enum):
    """How an input was made."""

    WRITTEN = "valid"
    FIELDS = "mutated fields"
    BYTES = "mutated bytes"
    RANDOM = "random bytes"
    AGAIN = "repeated"
    FOREIGN = "another call's message"


_KINDS: Final = {Kind.WRITTEN: 38, Kind.FIELDS: 34, Kind.BYTES: 14, Kind.RANDOM: 5, Kind.AGAIN: 6, Kind.FOREIGN: 3}


class Finding(AssertionError):  # noqa: N818 - a finding about the server
    """An input that the server did not handle as documented."""


@dataclass(slots=True)
class Report:
    """Figures of a campaign.

    Attributes:
        inputs: Number of inputs by call and kind.
        codes: Number of results by call and code; PARSE for messages that cannot be parsed, which grpc refuses.
        integrity_checks: Number of integrity checks.
        deep_comparisons: Number of refusals after which the whole visible state was compared.
        peak_rss_bytes: Peak memory of the process.
        grown_bytes: Growth of the memory after the first tenth.
    """

    inputs: Counter[tuple[str, str]] = field(default_factory=Counter)
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    integrity_checks: int = 0
    deep_comparisons: int = 0
    peak_rss_bytes: int = 0
    grown_bytes: int = 0


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Campaign:
    """One server and the inputs sent to it."""

    def __init__(self, seed: int, allocator: DrivenState | None = None) -> None:
        self.report = Report()
        self._seed = seed
        self._rng = Random(seed)
        self._served = Served(Random(seed), allocator)
        self._grammar = Grammar(self._rng, self._served)
        self._ranks = RankGrammar(self._rng, self._served)
        self._keys = list(METHODS)
        self._weights = [_WEIGHTS.get(key, 2) for key in self._keys]
        self._open: dict[str, list[OpenCall]] = {key: [] for key in self._keys}
        self._recent: deque[tuple[str, str, bytes]] = deque(maxlen=_KEPT_INPUTS)
        self._is_settled = False
        self._before: object = None
        self._whole: object = None

    async def run(self, num_inputs: int, progress: Callable[[int], None] = lambda _: None) -> None:
        """Sends `num_inputs` inputs.

        Raises:
            Finding: An input was not handled as documented. The same seed finds it again.
        """
        settled_bytes = 0
        for i in range(num_inputs):
            try:
                await self._send_one(is_deep=i % CHECK_EVERY == 0)
                if i % CHECK_EVERY == 0:
                    self.check()
            except Exception as error:
                raise self._finding(i, error) from error
            if i % 50 == 0:
                self._served.pass_time(self._rng.choice((0.01, 0.1, 0.5)))
                self._is_settled = False
            if i == num_inputs // 10:
                settled_bytes = rss_bytes()
            progress(i)
        self.report.grown_bytes = rss_bytes() - settled_bytes
        self.report.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    async def _send_one(self, *, is_deep: bool) -> None:
        await self._settle()
        method = METHODS[self._rng.choices(self._keys, self._weights)[0]]
        kind = self._rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        call = self._stream(method) if method.is_stream else None
        data = self._make(method, kind, call)
        if data is None:
            method, kind, call = METHODS["AllocatorService.CreatePool"], Kind.WRITTEN, None
            data = self._make(method, kind, None) or b""
        self._whole = self._served.whole() if is_deep else None
        await self._take(method, kind, call, data)

    async def take(self, method: Method, data: bytes) -> None:
        """Sends an input made by the caller.

        Raises:
            Finding: The input was not handled as documented.
        """
        await self._settle()
        try:
            await self._take(method, Kind.RANDOM, self._stream(method) if method.is_stream else None, data)
        except Exception as error:
            raise self._finding(self.report.inputs.total(), error) from error

    def message(self, method: Method) -> bytes:
        """A valid message for the current state; empty if its subject does not exist."""
        return self._make(method, Kind.WRITTEN, self._stream(method) if method.is_stream else None) or b""

    def check(self) -> None:
        """Runs the integrity checks."""
        self._served.check()
        self.report.integrity_checks += 1

    async def _take(self, method: Method, kind: Kind, call: OpenCall | None, data: bytes) -> None:
        self._recent.append((method.key, kind.value, data))
        self.report.inputs[method.key, kind.value] += 1
        if call:
            await self._say(call, data)
        elif method.answers_stream or method.name == "WaitUntilReady":
            await self._watch(method, data)
        else:
            await self._call(method, data)

    def _make(self, method: Method, kind: Kind, call: OpenCall | None) -> bytes | None:
        rng = self._rng
        if kind is Kind.RANDOM:
            return rng.randbytes(rng.choice((0, 1, 2, 5, 20, 200)))
        if kind is Kind.AGAIN or kind is Kind.FOREIGN:
            earlier = [data for key, _, data in self._recent if (key == method.key) is (kind is Kind.AGAIN)]
            return rng.choice(earlier) if earlier else b""
        message = self._write(method, call)
        if message is None:
            return None
        if kind is Kind.FIELDS:
            mutate_fields(rng, message)
        data = message.SerializeToString()
        if kind is Kind.BYTES:
            others = [other for key, _, other in self._recent if key == method.key] or [b""]
            data = mutate_bytes(rng, data, rng.choice(others))
        return data

    def _write(self, method: Method, call: OpenCall | None) -> Message | None:
        """A valid message; on a stream, one that continues with the stream's subject."""
        if call is None:
            return self._grammar.write(method.key)
        if method.name == "Join":
            call.about = call.about or self._ranks.pool()
            return self._ranks.write(call.about, is_first=call.is_new)
        step = self._grammar.step(call.about)
        call.about = step.session_id if step else ""
        return step

    async def _settle(self) -> None:
        """Lets streams that ended for other reasons finish their work."""
        if not self._is_settled:
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)
            self._before = self._served.fingerprint()
            self._is_settled = True

    async def _call(self, method: Method, data: bytes) -> None:
        ended = await self._served.call(method, data)
        self._judge(method, ended)
        self._grammar.page_tokens[method.key] = getattr(ended.answer, "next_page_token", "") if ended else ""

    def _stream(self, method: Method) -> OpenCall:
        """One of the open streams, or a new one."""
        streams = self._open[method.key]
        for call in [call for call in streams if call.is_over]:  # ended by another stream, an operator, or time
            streams.remove(call)
            self._count(method, call.result())
        if not streams or (len(streams) < _OPEN_CALLS and self._rng.random() < 0.1):
            streams.append(OpenCall(self._served, method))
        return self._rng.choice(streams)

    async def _say(self, call: OpenCall, data: bytes) -> None:
        """Sends a message on a stream."""
        method = call.method
        call.is_new = False
        try:
            ended = await call.say(None if self._rng.random() < 0.01 else data)
        except DecodeError as error:
            raise AssertionError("a message that cannot be parsed ended without an error") from error
        # The end of a rank's stream changes its pool: the rank is lost. A stream without messages leaves no trace.
        leaves_trace = method.name == "Join" and bool(call.written)
        self._judge(method, ended or Ended(grpc.StatusCode.OK), leaves_trace=leaves_trace)
        if call.is_over:
            self._open[method.key].remove(call)

    async def _watch(self, method: Method, data: bytes) -> None:
        """Starts a call that may wait for long, and ends the oldest waiting one."""
        waiting = self._open[method.key]
        try:
            method.request.FromString(data)
        except DecodeError:
            self._judge(method, None)
            return
        call = OpenCall(self._served, method)
        call.begin(data)
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
        self._judge(method, call.result() if call.is_over else Ended(grpc.StatusCode.OK))
        if not call.is_over:
            waiting.append(call)
        if len(waiting) > _OPEN_CALLS:
            self._count(method, await waiting.pop(0).cancel())

    def _judge(self, method: Method, ended: Ended | None, *, leaves_trace: bool = False) -> None:
        """Checks the result of a call against its documentation."""
        after = self._served.fingerprint()
        self._count(method, ended)
        is_refused = ended is None or ended.code is not grpc.StatusCode.OK
        if is_refused and not leaves_trace:
            assert after == self._before, f"changed by a refusal:\n{self._before}\n{after}"
            if self._whole is not None:
                assert self._served.whole() == self._whole, "changed by a refusal, deep within"
                self.report.deep_comparisons += 1
        self._before = after
        self._is_settled = not any(self._open.values())

    def _count(self, method: Method, ended: Ended | None) -> None:
        self.report.codes[method.key, ended.code.name if ended else "PARSE"] += 1
        if ended and ended.code is not grpc.StatusCode.CANCELLED:
            assert ended.code in method.codes, f"{method.key} ended with {ended}\n{self._served.bug()}"

    async def close(self) -> None:
        """Ends all open calls, and runs the integrity checks a last time."""
        for key, calls in self._open.items():
            for call in calls:
                self._count(METHODS[key], await call.cancel())
        self._served.check()
        self._served.close()

    def _finding(self, index: int, error: Exception) -> Finding:
        key, kind, data = self._recent[-1]
        return Finding(f"seed {self._seed}, input {index}, {key} ({kind}): {data.hex()}\n{error!r}")
