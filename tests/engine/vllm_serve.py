"""`vllm serve` in processes of its own, and the requests that its users send."""

import http.client
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.drawn_weights import write_weights
from engine.environment import VLLM_ENVIRONMENT
from engine.models import LLAMA, write_model
from engine.pairs import SCHEDULER
from engine.workloads import BLOCK_TOKENS, LONGEST_TOKENS, Request, make_workload
from support.logging_process import LoggingProcess
from support.waiting import wait_until

NUM_BLOCKS = 100
LEASE_SECONDS = 3600.0
"""Longer than all that tests wait for."""
REQUESTS = make_workload("shared prefixes").requests[:40]
_START_SECONDS = 300.0
_ANSWER_SECONDS = 240.0
_NUM_USERS = 10
_LOG_LINES = 100
_JSON = {"Content-Type": "application/json"}
_TINY = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(LONGEST_TOKENS)),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(NUM_BLOCKS)),
)


@dataclass(frozen=True, slots=True)
class Completion:
    """What a user received: generated tokens, and how many of the prompt's were cached (0 in a stream)."""

    tokens: list[int]
    cached_tokens: int


class _Connection(http.client.HTTPConnection):
    """A connection over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class VllmServe:
    """A `vllm serve`, in a process group of its own.

    Attributes:
        process: Its API server, or what starts its API servers.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *options: str,
        kvpool: dict[str, Any] | None = None,
        usual: Sequence[str] = _TINY,
        environment: Mapping[str, str] = VLLM_ENVIRONMENT,
    ) -> None:
        """Starts it; returns before it is ready.

        Args:
            folder: Where its socket is, beside the folder of the model.
            name: Name of its socket.
            options: More options.
            kvpool: Settings of its engine on a service; None for vLLM alone.
            usual: Options that the engines of its kind have.
            environment: Variables beside those of this process.
        """
        self._socket = folder / name
        if kvpool is not None:
            config = json.dumps({"kvpool": {"lease_seconds": LEASE_SECONDS, **kvpool}})
            options = (*options, "--scheduler-cls", SCHEDULER, "--additional-config", config)
        self.process = LoggingProcess(
            *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model")),
            *("--uds", str(self._socket), "--served-model-name", "tiny", "--skip-tokenizer-init"),
            *("--enable-prompt-tokens-details", *usual, *options),
            environment={
                **environment,
                "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                "VLLM_SERVER_DEV_MODE": "1",  # else it cannot sleep, and tells nothing of its workers
            },
            start_new_session=True,
        )  # fmt: skip

    def wait_ready(self, seconds: float = _START_SECONDS) -> None:
        """Waits until it serves."""
        with suppress(AssertionError):  # its log says more
            wait_until(lambda: self.is_healthy or not self.process.is_alive, seconds=seconds)
        assert self.is_healthy, f"it does not start; its log ends with:\n{''.join(self.process.lines[-_LOG_LINES:])}"

    @property
    def is_healthy(self) -> bool:
        """Whether it reports to be healthy."""
        with closing(_Connection(self._socket)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == http.client.OK
            except OSError:
                return False

    @property
    def engine_pids(self) -> set[int]:
        """Processes of its engines."""
        return {int(pid) for pid in re.findall(r"\(EngineCore\w* pid=(\d+)\)", self.process.log)}

    def complete(self, request: Request, *, is_stream: bool = False) -> Completion:
        """Sends a request, and waits for the whole answer."""
        with self._sent(request, is_stream=is_stream) as response:
            if is_stream:
                return Completion([token for tokens in _events(response) for token in tokens], 0)
            answer = json.loads(response.read())
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Completion(answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Sends a request; returns the answer."""
        with closing(_Connection(self._socket)) as connection:
            connection.request("POST", path, json.dumps(body) if body else None, _JSON)
            with connection.getresponse() as response:
                answer = response.read()
                assert response.status == http.client.OK, answer
                return json.loads(answer or b"{}")  # type: ignore[no-any-return]

    def complete_all(self, requests: Sequence[Request]) -> list[list[int]]:
        """Sends requests of several users at once, every other one as a stream; returns the tokens of each."""
        with ThreadPoolExecutor(_NUM_USERS) as users:
            answers = [
                users.submit(self.complete, each, is_stream=bool(number % 2)) for number, each in enumerate(requests)
            ]
            return [answer.result().tokens for answer in answers]

    @contextmanager
    def begun(self, request: Request) -> Iterator[Iterator[list[int]]]:
        """Sends a request and waits for its first tokens; yields all, step by step. Disconnects at the end."""
        with self._sent(request, is_stream=True) as response:
            events = _events(response)
            first = next(events)
            assert first
            yield chain([first], events)

    @contextmanager
    def _sent(self, request: Request, *, is_stream: bool) -> Iterator[http.client.HTTPResponse]:
        body = {
            "model": "tiny",
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": is_stream,
        }
        with closing(_Connection(self._socket)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), _JSON)
            with connection.getresponse() as response:
                assert response.status == http.client.OK, response.read()
                yield response

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process that was started, as service managers do."""
        self.process.signal(number)

    def kill(self) -> None:
        """Kills all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.end()

    def end(self) -> None:
        """Kills what is left of it."""
        try:
            self.kill()
        except ProcessLookupError:
            self.process.end()


def _events(response: http.client.HTTPResponse) -> Iterator[list[int]]:
    """Yields the tokens of each event of a stream."""
    for line in response:
        _, _, data = line.decode().strip().partition("data: ")
        if data == "[DONE]":
            return
        if data:
            event = json.loads(data)
            assert "error" not in event, event
            yield event["choices"][0]["token_ids"] or []
    raise ConnectionError("the stream ended early")


class Serving:
    """Starts `vllm serve` on one model, and ends what it started."""

    def __init__(self, stack: ExitStack, model: Mapping[str, object]) -> None:
        self._stack = stack
        self._num_started = 0
        self.folder = Path(stack.enter_context(TemporaryDirectory()))  # shorter than tmp_path: sockets have limits
        write_model(model, self.folder / "model")
        write_weights(self.folder / "model")

    def start(self, *options: str, kvpool: dict[str, Any] | None = None) -> VllmServe:
        """Starts one; returns when it is ready. See `VllmServe`."""
        self._num_started += 1
        started = VllmServe(self.folder, f"v{self._num_started}", *options, kvpool=kvpool)
        self._stack.callback(started.end)
        started.wait_ready()
        return started

    def tokens_of_vllm_alone(self, requests: Sequence[Request], *options: str) -> list[list[int]]:
        """Returns the answers of vLLM with its own scheduler."""
        plain = self.start(*options)
        tokens = [plain.complete(each).tokens for each in requests]
        plain.kill()
        return tokens


@contextmanager
def serving(model: Mapping[str, object] = LLAMA) -> Iterator[Serving]:
    """Yields what starts `vllm serve`; ends all that it started."""
    with ExitStack() as stack:
        yield Serving(stack, model)
