"""Transcripts of a rank's protocol: what the rank does upon each event, and its state when that changed.

| command | event |
|---|---|
| `tick [1.5]` | 1.5 s pass, or the time until something is due |
| `joined` | the server accepts the stream |
| `plan 1 100 [groups]` | a plan of epoch 1 for 100 blocks, in which one of `PLANS` differs |
| `allocated [40]` | what the oldest plan asks for is allocated, or 40 blocks of it |
| `ready 1 100` | epoch 1 begins with 100 blocks |
| `status degraded 2 [3]` | the state of the pool in epoch 2, and the answer to heartbeat 3 |
| `fence 4 1 2 [live=1,2] [killed=1]` | fence 4: of epoch 1, sessions up to 2 have ended, except those that are live |
| `step a 1 [2]`, `done a` | a step of session 1 begins, of the current epoch or of epoch 2; it ends |
| `done` | the fence reports the end of steps once more |
| `gone 1 2 [epoch=7]` | processes of sessions 1 and 2 have exited |
| `lost [REASON]` | the stream ends with one of `ERRORS` |
| `leave`, `fail`, `abandon` | the process ends the rank |
| `join`, `open 1 [100]` | `tick` and `joined`; all that opens epoch 1; only the result is shown |
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from kvpool.core import errors
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.core.ranks.messages import FenceSet, HeldTensors, Planned, PoolState, PoolStatus, Ready, Registered
from kvpool.core.specs.kinds import SlidingWindowSpec
from kvpool.gpu_worker import rank_effects as effects
from kvpool.gpu_worker.rank_protocol import RankProtocol
from kvpool.lending.fence import Fence, StepTicket
from support.rank_server import plan_config
from support.ranks import registration
from support.transcripts import Played

_TIMING: Final = Registered(1.0, 5.0, 30.0)
_MAX_MODEL_LEN: Final = 1024
ERRORS: Final = {
    "UNAVAILABLE": errors.UnavailableError("UNAVAILABLE", ""),
    "NOT_READING": errors.ExhaustedError("NOT_READING", ""),
    "TOKEN_REVOKED": errors.UnauthenticatedError("TOKEN_REVOKED", ""),
    "NOT_PRIMARY": errors.NotPrimaryError((), 0),
}


def _other_window(config: KVCacheConfig) -> KVCacheConfig:
    spec = SlidingWindowSpec(16, 2, 8, "float32", sliding_window=65)
    return replace(config, groups=(config.groups[0], replace(config.groups[1], spec=spec)))


def _first_tensor(config: KVCacheConfig, **changes: object) -> KVCacheConfig:
    first, *others = config.tensors
    return replace(config, tensors=(replace(first, **changes), *others))  # type: ignore[arg-type]


PLANS: Final[dict[str, Callable[[KVCacheConfig], KVCacheConfig]]] = {
    "shared-by": lambda config: _first_tensor(config, shared_by=config.tensors[0].shared_by[::-1]),
    "pages": lambda config: _first_tensor(config, size_bytes=config.tensors[0].size_bytes * 2),
    "groups": _other_window,
}
"""Other layouts of a plan."""


class _Fence(Fence):
    """A fence that notes what the protocol does with it."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def end(self) -> None:
        if self.epoch:
            self._notes.append(f"excludes all steps of epoch {self.epoch}")
        super().end()

    def kill(self, leases: Collection[TableLease]) -> None:
        self._notes += [f"kills the processes of session {lease.session_number}" for lease in leases]

    def narrow(self, last_session_number: int, live: Collection[int]) -> None:
        self._notes.append(f"excludes sessions up to {last_session_number} except {_numbers(live)}")
        super().narrow(last_session_number, live)


class RankTranscript(Played):
    """A rank and its clock. Nothing happens without a command."""

    def __init__(self, continued_epoch: int = 0) -> None:
        """A rank without a stream; with tensors and a fence of an earlier process if an epoch is continued."""
        super().__init__()
        self.fence = _Fence(self.lines)
        held = effects.Allocation(plan_config(100), 100, 1) if continued_epoch else None
        past = replace(registration(), held=HeldTensors(continued_epoch, 100), last_epoch=continued_epoch)
        self.rank = RankProtocol(
            past if continued_epoch else registration(), ("h:1",), self.fence, held, draw=lambda: 0.0
        )
        if continued_epoch:
            self.fence.begin(continued_epoch)
        self._now = 1000.0
        self._plans: list[Planned] = []
        self._steps: dict[str, StepTicket] = {}

    def _carry_out(self, happened: list[effects.Effect]) -> None:
        for effect in happened:
            self.lines.append(_line(effect))
            if isinstance(effect, effects.Allocate):
                self._plans.append(effect.planned)
            if isinstance(effect, effects.EpochBegan):
                self.fence.open(effect.ready.epoch)

    def _do_tick(self, seconds: str = "") -> None:
        self._now = self._now + float(seconds) if seconds else max(self._now, self.rank.next_due_seconds)
        self._carry_out(self.rank.tick(self._now))

    def _do_joined(self) -> None:
        self._carry_out(self.rank.received(_TIMING, self._now))

    def _do_plan(self, epoch: str, num_blocks: str, layout: str = "") -> None:
        config = plan_config(int(num_blocks))
        config = PLANS[layout](config) if layout else config
        self._carry_out(self.rank.received(Planned(int(epoch), config, _MAX_MODEL_LEN), self._now))

    def _do_allocated(self, num_blocks: str = "") -> None:
        planned = self._plans.pop(0)
        got = effects.Allocation(planned.config, int(num_blocks or planned.config.num_blocks), 1)
        self._carry_out(self.rank.allocated(planned, got))

    def _do_ready(self, epoch: str, num_blocks: str) -> None:
        self._carry_out(self.rank.received(Ready(int(epoch), int(num_blocks), _MAX_MODEL_LEN), self._now))

    def _do_status(self, state: str, epoch: str, heartbeat: str = "0") -> None:
        self._carry_out(self.rank.received(PoolStatus(PoolState(state), int(epoch), (), int(heartbeat)), self._now))

    def _do_fence(self, sequence: str, epoch: str, last: str, live: str = "", killed: str = "") -> None:
        numbers = [tuple(SessionNumber(int(each)) for each in text.split(",") if each) for text in (live, killed)]
        self._carry_out(
            self.rank.received(FenceSet(int(sequence), int(epoch), SessionNumber(int(last)), *numbers), self._now)
        )

    def _do_step(self, name: str, session: str, epoch: str = "") -> None:
        lease = TableLease(int(epoch or self.fence.epoch), SessionNumber(int(session)))
        self._steps[name] = self.fence.step(lease)

    def _do_done(self, name: str = "") -> None:
        if name:
            self._steps.pop(name).done()
        self._carry_out(self.rank.steps_ended())

    def _do_gone(self, *sessions: str, epoch: str = "1") -> None:
        self._carry_out(
            self.rank.sessions_gone([TableLease(int(epoch), SessionNumber(int(each))) for each in sessions])
        )

    def _do_lost(self, reason: str = "UNAVAILABLE") -> None:
        self._carry_out(self.rank.stream_ended(ERRORS[reason], self._now))

    def _do_leave(self) -> None:
        self._carry_out(self.rank.leave())

    def _do_fail(self) -> None:
        self._carry_out(self.rank.fail(errors.ExhaustedError("OUT_OF_MEMORY", "")))

    def _do_abandon(self) -> None:
        self._carry_out(self.rank.abandon())

    def _do_join(self) -> None:
        self._do_tick()
        self._do_joined()
        self.lines.clear()

    def _do_open(self, epoch: str, num_blocks: str = "100") -> None:
        self._do_plan(epoch, num_blocks)
        if self._plans:
            self._do_allocated()
        self._do_ready(epoch, num_blocks)
        self.lines.clear()

    def _state(self) -> str:
        rank = self.rank
        due_seconds = max(0.0, rank.next_due_seconds - self._now)
        facts = [f"{rank.phase.value}, due in {due_seconds:g} s"]
        facts += [f"holds {rank.held.num_blocks} blocks"] if rank.held else []
        facts += [f"epoch {rank.ready.epoch} with {rank.ready.num_blocks} blocks"] if rank.ready else []
        facts += [f"the pool is {rank.status.state.value}"] if rank.status else []
        return "; ".join(facts)


def _line(effect: effects.Effect) -> str:  # noqa: PLR0911 - a case per effect
    match effect:
        case effects.OpenStream(said):
            held = f"{said.held.num_blocks} blocks of epoch {said.held.epoch}" if said.held else "nothing"
            return f"opens a stream as {said.boot_id}: holds {held}, newest epoch {said.last_epoch}"
        case effects.Send(message):
            return f"sends: {_message(message)}"
        case effects.Allocate(planned):
            return f"allocates {planned.config.num_blocks} blocks for epoch {planned.epoch}"
        case effects.EpochBegan(ready):
            return f"epoch {ready.epoch} begins with {ready.num_blocks} blocks"
        case effects.EpochPassed(epoch):
            return f"epoch {epoch} has passed"
        case effects.JoinLater(error, pause_seconds):
            return f"joins again in {pause_seconds:g} s: {error.reason}"
        case effects.Failed(error):
            return f"has failed: {type(error).__name__}"


def _message(message: effects.WorkerMessage) -> str:
    match message:
        case effects.Initialized(epoch, allocation):
            return f"allocated {allocation.num_blocks} blocks for epoch {epoch}"
        case effects.Heartbeat(sequence):
            return f"heartbeat {sequence}"
        case effects.Fenced(sequence, pending):
            return f"fence {sequence} is enforced, pending {_numbers(pending)}"
        case effects.SessionsGone(numbers):
            return f"gone are sessions {_numbers(numbers)}"
        case effects.Leave():
            return "leave"


def _numbers(numbers: Collection[int]) -> str:
    return " ".join(map(str, numbers)) or "none"
