"""Figures of vLLM as users run it, alone and on memory that kvpool lends. Prints one JSON object.

Requests with times of their own come from the client of vLLM's own benchmark. Engines run one after the other, with the
same memory for keys and values. A part that fails does not stop the others. The object is printed after each part, with
all figures so far.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp
import numpy as np
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions
from vllm.benchmarks.serve import get_request

from engine.bench_scheduler import measure as measure_scheduler
from engine.vllm_serve import VllmServe
from engine.workloads import Request
from gpu.comparison import NO_DEVICE, Figures, checked, compared, idle, trace_events
from gpu.native_engine import ALONE, ANSWER_TOKENS, LENT, Place, Setup, closed_by_sigterm

RUNNING: Final = (1, 8, 32, 64, 256)
PROFILED_RUNNING: Final = 32
PROFILED_STEPS: Final = 32
SKIPPED_STEPS: Final = 8
PROFILED_TOKENS: Final = SKIPPED_STEPS + PROFILED_STEPS + 8
POOL: Final = "figures"
_SHARE: Final = 0.6
"""Of the device, which must be free when an engine starts: others may use the rest."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured on a kind of device.

    Attributes:
        memory_bytes: For keys and values.
        decode_tokens: Output of a request whose decodes are measured.
        decode_rounds: Measurements of each number of running requests.
        poisson_requests: Requests that arrive independently of each other.
        poisson_per_s: How many of them arrive in a second, on average.
        poisson_tokens: Tokens of the prompt and of the output of each.
        chats: Chats at once.
        turns: Of each.
        system_tokens: What all chats begin with.
        known_tokens: A prompt that is sent before and after a restart.
        known_prompts: How many of them.
        options: Options of the engines; these sleep.
        activity: What the profiler records.
    """

    memory_bytes: int
    decode_tokens: int
    decode_rounds: int
    poisson_requests: int
    poisson_per_s: float
    poisson_tokens: tuple[int, int]
    chats: int
    turns: int
    system_tokens: int
    known_tokens: int
    known_prompts: int
    options: dict[str, object]
    activity: str


SIZES: Final = {
    "cuda": Sizes(
        memory_bytes=24 * 2**30,
        decode_tokens=256,
        decode_rounds=2,
        poisson_requests=256,
        poisson_per_s=16.0,
        poisson_tokens=(512, 128),
        chats=32,
        turns=5,
        system_tokens=512,
        known_tokens=4000,
        known_prompts=5,
        options={"enable_sleep_mode": True},
        activity="CUDA",
    ),
    "cpu": Sizes(
        memory_bytes=2**30,
        decode_tokens=32,
        decode_rounds=1,
        poisson_requests=16,
        poisson_per_s=8.0,
        poisson_tokens=(64, 8),
        chats=4,
        turns=3,
        system_tokens=64,
        known_tokens=320,
        known_prompts=3,
        options={},
        activity="CPU",
    ),
}


class Prompts:
    """New prompts of random tokens: no two begin with the same block."""

    def __init__(self, vocabulary: int) -> None:
        self._draw = random.Random(3)  # noqa: S311 - prompts
        self._vocabulary = vocabulary

    def __call__(self, count: int, num_tokens: int) -> list[list[int]]:
        """Returns a number of prompts."""
        return [[self._draw.randrange(3, self._vocabulary) for _ in range(num_tokens)] for _ in range(count)]


class Side:
    """Engines of one setup, started one after the other: vLLM alone, or on lent memory.

    Attributes:
        known: Prompts that are sent before and after a restart.
    """

    def __init__(
        self, place: Place, setup: Setup, sizes: Sizes, choices: dict[str, Mapping[str, object]], traces: Path
    ) -> None:
        """Starts nothing yet.

        Args:
            place: Where its engines run. They get options here that are no others'.
            setup: How they keep their KV cache.
            sizes: What is measured.
            choices: See `Kind.options`. The first engine that starts leaves its own, for the engines of both sides.
            traces: Folder of what the profiler writes.
        """
        self.sizes = sizes
        self.setup = setup
        self.prompts = Prompts(int(str(place.kind.models["llama"]["vocab_size"])))
        self.traces = traces
        self.known = self.prompts(sizes.known_prompts, sizes.known_tokens)
        self._place = place
        self.choices = choices

    @contextmanager
    def engine(self) -> Iterator[VllmServe]:
        """Starts an engine and waits until it serves; kills it at the end.

        All have the same options: what vLLM compiles depends on them, and the second engine finds it compiled.
        """
        started = self._started()
        try:
            yield started
        finally:
            started.end()

    def _started(self) -> VllmServe:
        torch = {"dir": str(self.traces), "activities": [self.sizes.activity], "with_stack": False}
        profiler = {f"torch_profiler_{name}": value for name, value in torch.items()}
        usual = {name: each for name, each in self._place.options.items() if name != "max_num_batched_tokens"}
        for name, options in tuple(self.choices.items()):
            self._place.options = {
                **usual,
                **self.sizes.options,
                **options,
                "max_num_seqs": max(RUNNING),
                "gpu_memory_utilization": _SHARE,
                "profiler_config": {"profiler": "torch", "ignore_frontend": True, **profiler},
            }
            engine = self._place.serve(self.setup, POOL)
            try:
                engine.wait_ready(self._place.kind.start_seconds)
            except AssertionError:
                sys.stderr.write(f"{name}: {traceback.format_exc()}")
                engine.end()
                continue
            self.choices.clear()
            self.choices[name] = options
            return engine
        raise AssertionError(f"{self.setup.name}: no engine starts")


def send(
    engine: VllmServe, prompts: Sequence[list[int]], output_tokens: int, per_second: float = math.inf
) -> list[Any]:
    """Sends requests to an engine, at once or as a Poisson process; returns what vLLM's benchmark measured."""
    np.random.seed(5)  # noqa: NPY002 - vLLM's benchmark draws the arrivals from it

    async def send_all() -> list[Any]:
        connector = aiohttp.UnixConnector(str(socket_of(engine)), limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            tasks = []
            async for each, _ in get_request([SampleRequest(prompt, len(prompt)) for prompt in prompts], per_second):
                request = RequestFuncInput(
                    prompt=each.prompt,
                    api_url="http://localhost/v1/completions",
                    prompt_len=each.prompt_len,
                    output_len=output_tokens,
                    model="tiny",
                    ignore_eos=True,
                    extra_body={"temperature": 0},
                )
                tasks.append(asyncio.create_task(async_request_openai_completions(request, session)))
            return await asyncio.gather(*tasks)

    outputs = asyncio.run(send_all())
    for output in outputs:
        assert output.success, output.error
        assert output.output_tokens == output_tokens, f"{output.output_tokens} tokens in place of {output_tokens}"
    return outputs


def socket_of(engine: VllmServe) -> Path:
    """Where an engine listens."""
    command = engine.process.command
    return Path(command[command.index("--uds") + 1])


def first_token_ms(engine: VllmServe, prompts: Sequence[list[int]]) -> float:
    """Median time to the first token of prompts that are sent one after the other."""
    seconds: list[float] = [send(engine, [prompt], 1)[0].ttft for prompt in prompts]
    return round(1000 * statistics.median(seconds), 2)


def decode(side: Side, engine: VllmServe) -> Figures:
    """Tokens per second of requests with short prompts that come at once.

    Answers are whole: as streams, those of many requests would measure the HTTP server and its client.
    """
    figures: Figures = {}
    for running in RUNNING:
        rates = []
        with ThreadPoolExecutor(running) as users:
            for _ in range(side.sizes.decode_rounds + 1):  # the first is not counted
                prompts = side.prompts(running, 16)
                requests = [Request(tuple(each), side.sizes.decode_tokens) for each in prompts]
                begun = time.monotonic()
                num_tokens = sum(len(answer.tokens) for answer in users.map(engine.complete, requests))
                rates.append(num_tokens / (time.monotonic() - begun))
                assert num_tokens == running * side.sizes.decode_tokens, "tokens are missing"
        figures[f"decode_tokens_per_s_at_{running}"] = round(statistics.median(rates[1:]), 1)
    return figures


def poisson(side: Side, engine: VllmServe) -> Figures:
    """Times that users see whose requests arrive independently of each other."""
    prompt_tokens, output_tokens = side.sizes.poisson_tokens
    prompts = side.prompts(side.sizes.poisson_requests, prompt_tokens)
    outputs = send(engine, prompts, output_tokens, side.sizes.poisson_per_s)
    seconds = {
        "first_token": [each.ttft for each in outputs],
        "inter_token": [gap for each in outputs for gap in each.itl],
    }
    return {
        f"{name}_ms_p{percent}": round(1000 * float(np.percentile(times, percent)), 2)
        for name, times in seconds.items()
        for percent in (50, 99)
    }


def chats(side: Side, engine: VllmServe) -> Figures:
    """Share of the prompt tokens that is cached in chats: each prompt is the chat so far, and a new question."""
    (system,) = side.prompts(1, side.sizes.system_tokens)
    prompts = [system] * side.sizes.chats
    asked = cached = 0
    with ThreadPoolExecutor(side.sizes.chats) as users:
        for _ in range(side.sizes.turns):
            questions = side.prompts(side.sizes.chats, 48)
            prompts = [prompt + question for prompt, question in zip(prompts, questions, strict=True)]
            answers = list(users.map(lambda prompt: engine.complete(Request(tuple(prompt), 32)), prompts))
            asked += sum(map(len, prompts))
            cached += sum(answer.cached_tokens for answer in answers)
            prompts = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    return {"chat_hit_percent": round(100 * cached / asked, 2)}


def device_idle(side: Side, engine: VllmServe) -> Figures:
    """Time in which the device waits for the scheduler, from a trace of decode steps."""
    engine.post("/start_profile", {"delay_iterations": SKIPPED_STEPS, "max_iterations": PROFILED_STEPS})
    send(engine, side.prompts(PROFILED_RUNNING, 16), PROFILED_TOKENS)
    engine.post("/stop_profile")
    figures = idle(trace_events(side.traces), PROFILED_STEPS)
    assert side.sizes.activity == "CPU" or NO_DEVICE not in figures.values(), "the trace has no kernels"
    return figures


def restart(side: Side, engine: VllmServe) -> Figures:
    """The first token of an engine whose predecessor was killed, of new and of known prompts."""
    first_token_ms(engine, side.prompts(1, side.sizes.known_tokens))  # the device loads its kernels
    figures = {
        "restart_new_prompt_ms": first_token_ms(engine, side.prompts(len(side.known), side.sizes.known_tokens)),
        "restart_known_prompt_ms": first_token_ms(engine, side.known[1:]),
    }
    check_hits(engine, side.known[0], is_warm=side.setup.is_lent)
    return figures


def sleep(side: Side, engine: VllmServe) -> Figures:
    """An engine sleeps and wakes; a known prompt comes first. A request has the same answer before and after.

    vLLM alone forgets its cache, so its request has no cached tokens before either.
    """
    (prompt,) = side.prompts(1, side.sizes.known_tokens)
    request = Request(tuple(prompt), ANSWER_TOKENS)
    if side.setup.is_lent:
        engine.complete(request)
    before = engine.complete(request)
    times = [time.monotonic()]
    for path in ("/sleep?level=1", "/wake_up"):
        engine.post(path)
        times.append(time.monotonic())
    figures = {
        "sleep_ms": round(1000 * (times[1] - times[0]), 1),
        "wake_ms": round(1000 * (times[2] - times[1]), 1),
        "known_prompt_after_wake_ms": first_token_ms(engine, side.known[1:]),
    }
    after = engine.complete(request)
    assert (before.cached_tokens > 0) == side.setup.is_lent, f"{before.cached_tokens} tokens are cached"
    assert after == before, f"{after} after it slept, {before} before"
    return figures


def check_hits(engine: VllmServe, prompt: list[int], *, is_warm: bool) -> None:
    """Checks that a prompt is cached, or is not."""
    cached = engine.complete(Request(tuple(prompt), 1)).cached_tokens
    assert (cached > 0) == is_warm, f"{cached} of {len(prompt)} tokens are cached"


PARTS: Final = (decode, poisson, chats, device_idle), (restart, sleep)
"""What is measured with the first engine of a side, and with its successor."""


class Progress:
    """Figures so far, printed after each part: a stage that is killed has those of the parts before.

    Attributes:
        sides: Figures of each side.
        lacking: Parts that have failed, or have not come yet.
    """

    def __init__(self, sides: Sequence[str], known_tokens: int) -> None:
        self._known_tokens = known_tokens
        self.sides: dict[str, Figures] = {side: {} for side in sides}
        self.engines = ""
        names = [*(part.__name__ for parts in PARTS for part in parts), "engines"]
        self.lacking = ["scheduler", *(f"{side} {name}" for side in sides for name in names)]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part. If it fails, the next one comes."""
        begun = time.monotonic()
        try:
            yield
        except Exception:  # noqa: BLE001 - it is reported, and the stage fails
            traceback.print_exc()
        else:
            self.lacking.remove(name)
        sys.stderr.write(f"{name}: {time.monotonic() - begun:.1f} s\n")
        figures: Figures = {"engines": self.engines, "known_prompt_tokens": self._known_tokens}
        figures |= {"lacking": ", ".join(self.lacking), **compared(**self.sides)}
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()

    def add(self, side: str, figures: Figures) -> None:
        """Adds figures of a side.

        Raises:
            ValueError: One is no positive number.
        """
        self.sides[side] |= checked(figures)


def measure(name: str, side: Side, progress: Progress) -> None:
    """Adds all figures of a side: of an engine that is killed at the end, and of its successor."""
    for number, parts in enumerate(PARTS):
        begun = time.monotonic()
        with side.engine() as engine:
            if number:
                progress.add(name, {"restart_until_healthy_s": round(time.monotonic() - begun, 1)})
            (progress.engines,) = side.choices
            for part in parts:
                with progress.part(f"{name} {part.__name__}"):
                    progress.add(name, part(side, engine))
            if not number:
                first_token_ms(engine, side.known)


def scheduler_times(address: str) -> dict[str, Figures]:
    """Mean scheduler time per step in microseconds, without a model: of vLLM alone, and in shared memory."""
    found: dict[str, Figures] = {"vllm": {}, "shared memory": {}}
    for running in RUNNING:
        result = measure_scheduler(running, address)
        for name, figures in found.items():
            figures[f"scheduler_us_at_{running}"] = result[name]["mean_step_us"]
    return {"alone": found["vllm"], "kvpool": found["shared memory"]}


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    os.environ["KVPOOL_FRESH_PROCESSES"] = "1"  # the service is measured, too
    sizes = SIZES[device.partition(":")[0]]
    with closed_by_sigterm() as stack:
        place = Place(stack, "llama", device)
        place.kind = replace(place.kind, memory_bytes=sizes.memory_bytes)
        choices = dict(place.kind.options)
        setups = {"alone": ALONE, "kvpool": LENT}
        progress = Progress(tuple(setups), sizes.known_tokens)
        for name, setup in setups.items():
            with progress.part(f"{name} engines"), TemporaryDirectory() as traces:
                measure(name, Side(place, setup, sizes, choices, Path(traces)), progress)
        with progress.part("scheduler"):
            for name, times in scheduler_times(place.server).items():
                progress.add(name, times)
    return 1 if progress.lacking else 0


if __name__ == "__main__":
    sys.exit(main())
