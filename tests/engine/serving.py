"""Engines that serve requests in processes of their own, beside real lenders; see served_engine.py."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Self

from engine.forks import start
from engine.lending import attached_to, start_lender
from engine.models import LLAMA, write_model
from support.logging_process import LoggingProcess
from support.processes import PIPE

BLOCK_TOKENS = 32
START_SECONDS = 600.0
ANSWER_SECONDS = 240.0
AHEAD = {"async_scheduling": True, "distributed_executor_backend": "mp"}
"""Arguments of an engine that schedules a step ahead."""
BESIDE: dict[str, Any] = {"background_copy_mib": 0}
"""Settings of an engine that copies nearly all hits from host memory while other requests run."""
SLOW = {"worker_cls": "engine.slow_worker.SlowWorker"}
"""Arguments of an engine on lent memory whose steps run late."""


@dataclass(slots=True)
class Answer:
    """What an engine answered so far.

    Attributes:
        prompt: The request's tokens.
        tokens: Generated tokens.
        cached_tokens: Tokens of the prompt that were in the cache.
        first_seconds: Time from the request to its first token.
        is_finished: Whether all tokens are there.
    """

    prompt: Sequence[int]
    since: float
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    first_seconds: float = 0.0
    is_finished: bool = False


class ServedEngine:
    """An engine.

    Attributes:
        process: Its process.
        answers: What it answered, by request.
        num_steps: Number of steps that it reported.
    """

    def __init__(self, llm: Mapping[str, object], log: Path) -> None:
        """Starts it; returns before it is ready."""
        self._log = log
        self.process = start(
            "engine.served_engine", json.dumps(llm), log=log, stdin=PIPE, stdout=PIPE, text=True,
            start_new_session=True,  # so that signal() reaches its workers
        )  # fmt: skip
        self.answers: dict[str, Answer] = {}
        self.num_steps = 0
        self._calls: list[tuple[float, str]] = []
        self._is_ready = self._has_ended = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Waits until it takes requests."""
        self._wait_until(lambda: self._is_ready, START_SECONDS)

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int, ends: Sequence[int] = ()) -> Answer:
        """Sends a request when the engine is ready; the request ends at a token of `ends`."""
        self.wait_ready()
        answer = self.answers[name] = Answer(prompt, time.monotonic())
        self._send(name, list(prompt), max_tokens, list(ends))
        return answer

    def abort(self, name: str) -> None:
        """Aborts a request."""
        self._send(name)

    def call(self, method: str, *arguments: object) -> float:
        """Calls a method of vLLM's LLMEngine; returns how long it took, in seconds."""
        seconds, error = self.try_call(method, *arguments)
        assert not error, error
        return seconds

    def try_call(self, method: str, *arguments: object) -> tuple[float, str]:
        """Calls a method of vLLM's LLMEngine; returns how long it took, in seconds, and its error, if any."""
        count = len(self._calls) + 1
        self._send(method, arguments)
        self._wait_until(lambda: len(self._calls) == count, ANSWER_SECONDS)
        return self._calls[-1]

    def _send(self, *line: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def wait(self, *answers: Answer) -> None:
        """Waits until requests have been answered."""
        self._wait_until(lambda: all(each.is_finished for each in answers), ANSWER_SECONDS)

    def wait_for_one(self, *answers: Answer) -> None:
        """Waits until one of some requests has been answered."""
        self._wait_until(lambda: any(each.is_finished for each in answers), ANSWER_SECONDS)

    def wait_for_steps(self, count: int) -> None:
        """Waits until it has reported this number of steps, or has answered all requests, so that no step follows."""

        def is_met() -> bool:
            return self.num_steps >= count or all(each.is_finished for each in self.answers.values())

        self._wait_until(is_met, ANSWER_SECONDS)

    def stop(self) -> None:
        """Has it finish what it was asked, close its session, and exit."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(ANSWER_SECONDS) == 0, self._log.read_text()
        self._reader.join()

    def wait_for_end(self) -> str:
        """Waits until its process has ended by itself; returns what it logged."""
        self.process.wait(ANSWER_SECONDS)
        return self._log.read_text()

    @property
    def resident_shared_mib(self) -> float:
        """Shared memory that its process has mapped and touched."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (each for each in status.splitlines() if each.startswith("RssShmem"))
        return int(line.split()[1]) / 1024

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kills all its processes."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self._reader.join(ANSWER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends it, if a test has not: at once after an error."""
        if kind or self.process.poll() is not None:
            self.kill()
        else:
            self.stop()

    def _wait_until(self, is_met: Callable[[], bool], seconds: float) -> None:
        with self._news:
            while not is_met() and not self._has_ended:
                assert self._news.wait(seconds), f"nothing within {seconds} s:\n{self._log.read_text()}"
            status = self.process.poll()
            assert is_met(), f"the engine has ended ({status}):\n{self._log.read_text()}"

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as output:
            for line in output:
                self._take(json.loads(line))
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def _take(self, step: dict[str, Any]) -> None:
        now = time.monotonic()
        with self._news:
            if step.pop("ready", False):
                self._is_ready = True
            elif called := step.pop("called", None):
                self._calls.append(called)
            else:
                self.num_steps += 1
            for name, (cached, tokens, is_finished) in step.items():
                answer = self.answers[name]
                if not answer.tokens:
                    answer.cached_tokens, answer.first_seconds = cached or 0, now - answer.since
                answer.tokens += tokens
                answer.is_finished = is_finished
            self._news.notify_all()


class Site:
    """A service, a lender per rank, and engines of one model on their memory or on their own.

    Attributes:
        attached: More arguments of each engine on the lent memory.
    """

    attached: Mapping[str, object] = MappingProxyType({})

    def __init__(  # noqa: PLR0913, PLR0917 - see `site`
        self,
        stack: ExitStack,
        service: str,
        num_blocks: int,
        pool: str,
        num_ranks: int,
        model: Mapping[str, object],
        lender_flags: Sequence[str],
    ) -> None:
        """Starts the lenders, and no engine yet. What it starts ends with the stack."""
        self.pool = pool
        self.service = service
        self.num_blocks = num_blocks
        self._stack = stack
        self._folder = Path(stack.enter_context(TemporaryDirectory()))
        self._num_engines = 0
        self._num_ranks = num_ranks
        self._lender_flags = lender_flags
        write_model(model, self._folder / "model")
        self.memory_folder = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
        # Entered before any engine, so that a lender that is started again also stops after the engines.
        self._lenders = stack.enter_context(ExitStack())
        self.lender, *_ = [self.start_lender(rank) for rank in range(num_ranks)]

    def start_lender(self, rank: int = 0) -> LoggingProcess:
        """Starts the lender of a rank, at first or again."""
        flags = ("--lend-folder", str(self.memory_folder), *self._lender_flags)
        lender = start_lender(self.service, self.pool, self.memory, rank, self._num_ranks, *flags)
        self._lenders.callback(lender.stop)
        return lender

    @property
    def memory(self) -> str:
        """Address of the lenders."""
        return f"unix:{self._folder}/m{{rank}}"

    def engine(
        self,
        *,
        is_attached: bool = True,
        num_blocks: int = 0,
        options: Mapping[str, object] = MappingProxyType({}),
        **settings: object,
    ) -> ServedEngine:
        """Starts an engine on the lent memory, or vLLM alone, with more arguments of `vllm.LLM`."""
        llm: dict[str, object] = {
            "model": str(self._folder / "model"),
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "num_gpu_blocks_override": num_blocks or self.num_blocks,
        }
        if is_attached:
            attached = attached_to(self.service, self.pool, self.memory)
            attached["additional_config"]["kvpool"].update(settings)
            llm |= attached | dict(self.attached)
        llm |= options
        self._num_engines += 1
        return self._stack.enter_context(ServedEngine(llm, self._folder / f"engine-{self._num_engines}"))

    def engines(self, count: int, **options: Any) -> list[ServedEngine]:
        """Starts several that are alike, see `engine`; returns when all are ready."""
        engines = [self.engine(**options) for _ in range(count)]
        for engine in engines:
            engine.wait_ready()
        return engines

    def of_vllm_alone(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """What vLLM answers without kvpool, in memory that suffices for all requests."""
        engine = self.engine(is_attached=False, num_blocks=600)
        answers = [engine.ask(f"{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)]
        engine.wait(*answers)
        engine.stop()
        return answers


@contextmanager
def site(  # noqa: PLR0913 - with defaults
    service: str,
    num_blocks: int,
    pool: str = "shared",
    num_ranks: int = 1,
    *,
    model: Mapping[str, object] = LLAMA,
    lender_flags: Sequence[str] = (),
) -> Iterator[Site]:
    """Runs a site on a service; ends all that it started."""
    with ExitStack() as stack:
        yield Site(stack, service, num_blocks, pool, num_ranks, model, lender_flags)
