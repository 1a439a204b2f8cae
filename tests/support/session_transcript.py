"""Transcripts of a client's session in a pool of the same process: what it sends, its answers, and its requests.

Requests have names of one letter and the tokens 0, 1, 2, .... Blocks have 4 tokens.

| command | what happens |
|---|---|
| `pool [blocks=7] [caching=false] [max_len=16] [groups=window]` | another pool, and a session in it |
| `request a 5`, `running a 5` | a request of 5 tokens is made; and its tokens get slots, which is not shown |
| `append a 5 6`, `prompt a 6` | the request has further tokens; another length of its prompt |
| `allocate a 1 [computed=6] [lookahead=1] [delay]`, `admit a`, `free a`, `preempt a`, `close` | a call of the session |
| `step [executed=1] [launched=1] / decode a b tokens=7,7 / ...` | a step of operations, which are named as calls are |
| `begin ... / ...`, `settle` | a step is sent; it is answered |
| `lose` | the answer to the next step is lost |

`crash` in a step raises an error of the caller.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Final

from kvpool.client import Answer, Client, DeadlineError, KVCacheGroup, KvpoolError, PoolConfig, Request, Session
from kvpool.client.blocking import run
from kvpool.client.step_builder import StepBuilder
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.core.ids import PoolName
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Step, StepResult
from support.transcripts import arguments

_GROUPS: Final = {
    "full": (FullAttentionSpec(4),),
    "window": (FullAttentionSpec(8), SlidingWindowSpec(8, sliding_window=5)),
    "state": (FullAttentionSpec(4), MambaSpec(4)),
}


class RecordingTransport(EmbeddedTransport):
    """Records every step that is sent. Loses the answer to the next one if `lose` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Step] = []
        self.lose = False

    async def apply(self, session_id: str, step: Step) -> StepResult:
        self.sent.append(step)
        result = await super().apply(session_id, step)
        if self.lose:
            self.lose = False
            raise DeadlineError("DEADLINE", "lost")
        return result

    def take_sent(self) -> list[Step]:
        """Returns the steps sent since the last call."""
        sent, self.sent = self.sent, []
        return sent


class SessionTranscript:
    """A session and its requests."""

    transport: RecordingTransport
    session: Session

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._answers: list[tuple[str, Any]] = []
        self._shown: set[str] = set()
        self._do_pool()

    def execute(self, command: str, *words: str) -> list[str]:
        """Executes a command; returns its output."""
        lines = []
        try:
            if command in ("step", "begin"):
                self._step(command, words)
            else:
                do = getattr(self, f"_do_{command}", partial(self._operate, self.session, command))
                named, options = arguments(words)
                do(*named, **options)
        except (KvpoolError, ZeroDivisionError) as error:
            lines.append(f"refused: {getattr(error, 'reason', type(error).__name__)}{_field(error)}")
        lines[:0] = map(_sent, self.transport.take_sent())
        if command in ("step", "begin", "settle"):
            lines += [f"{name}: {_answer(answer)}" for name, answer in self._answers]
        state = self._state()
        lines += [line for line in state if line not in self._shown]
        self._shown = set(state)
        return lines

    def _do_pool(self, blocks: str = "100", caching: str = "true", max_len: str = "1024", groups: str = "full") -> None:
        self.transport, self._requests = RecordingTransport(), {}
        specs = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(_GROUPS[groups]))
        config = PoolConfig(PoolName("m"), int(blocks), int(max_len), specs, enable_caching=caching == "true",
                            allow_too_few_blocks=True)  # fmt: skip
        run(self.transport.create_pool(config))
        self.session = Client(self.transport).open_session("m")

    def _do_request(self, name: str, num_tokens: str) -> None:
        self._requests[name] = self.session.request(name, range(int(num_tokens)))

    def _do_running(self, name: str, num_tokens: str) -> None:
        self._do_request(name, num_tokens)
        assert self.session.admit(self._requests[name])
        self.transport.take_sent()

    def _do_append(self, name: str, *token_ids: str) -> None:
        self._requests[name].append([int(each) for each in token_ids])

    def _do_prompt(self, name: str, num_tokens: str) -> None:
        self._requests[name].num_prompt_tokens = int(num_tokens)

    def _do_lose(self) -> None:
        self.transport.lose = True

    def _do_settle(self) -> None:
        self.session.settle()

    def _do_close(self) -> None:
        self.session.close()

    def _do_executed(self, sequence: str) -> None:
        self.session.mark_executed(int(sequence))

    def _step(self, command: str, words: Sequence[str]) -> None:
        said, *operations = " ".join(words).split("/")
        reports = {f"{key}_sequence": int(value) for key, value in arguments(said.split())[1].items()}
        self._answers = []
        with (self.session.step if command == "step" else self.session.begin_step)(**reports) as step:
            for operation in filter(str.strip, operations):
                name, *rest = operation.split()
                named, options = arguments(rest)
                self._answers.append((operation.strip(), self._operate(step, name, *named, **options)))

    def _operate(self, on: Session | StepBuilder, operation: str, *words: str, **options: str) -> Any:
        requests = [self._requests[word] for word in words if word.isalpha() and word in self._requests]
        numbers = [int(word) for word in words if word.isdigit()]
        counts: dict[str, Any] = {_OPTIONS[key]: int(value) for key, value in options.items() if key in _OPTIONS}
        match operation:
            case "decode":
                tokens = [int(each) for each in options["tokens"].split(",")] if "tokens" in options else None
                return on.decode(requests, tokens, **counts)  # type: ignore[union-attr]
            case "allocate":
                return on.allocate_slots(requests[0], *numbers, delay_cache_blocks="delay" in words, **counts)
            case "common":
                return on.get_common_prefix_blocks(requests[0])
            case "look":
                return on.get_computed_blocks(requests[0])
            case "cache":
                return on.cache_blocks(requests[0], *numbers)
            case "crash":
                raise ZeroDivisionError
        return getattr(on, operation)(requests[0])

    def _state(self) -> list[str]:
        info = run(self.transport.get_pool("m"))
        lines = [
            f"{name}: {request.num_computed_tokens} of {request.num_tokens} tokens computed, blocks {request.block_ids}"
            for name, request in self._requests.items()
        ]
        counts = f"{info.free_blocks} free, {info.cached_blocks} cached, {info.activity.allocations} allocations"
        return [*lines, f"pool: {counts}"]


_OPTIONS: Final = {"computed": "num_computed_tokens", "lookahead": "num_lookahead_tokens"}


def _field(error: Exception) -> str:
    field = getattr(error, "field", "")
    return f" of {field}" if field else ""


def _sent(step: Step) -> str:
    """The columns of a step that have entries."""
    said = []
    for field in fields(step):
        value = getattr(step, field.name)
        if field.name == "operations":
            value = [Operation(each).name for each in value]
        if isinstance(value, bytes):
            value = len(value) // 32
        if any(value) if isinstance(value, list) else value:
            said.append(f"{field.name}={' '.join(map(str, value)) if isinstance(value, list) else value}")
    return f"sends {', '.join(said)}"


def _answer(answer: Any) -> str:
    if isinstance(answer, Answer):
        if answer.outcome is None:
            return "no answer"
        common = f", in common {answer.num_common_blocks}" if answer.num_common_blocks else ""
        return f"{answer.outcome.name} {answer.new_blocks}{common}"
    if answer is None:
        return "done"
    if not answer.is_answered:
        return "no answer"
    return f"{answer.new_blocks}, refused {({key: outcome.name for key, outcome in answer.refused.items()}) or 'none'}"
