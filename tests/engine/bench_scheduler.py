"""Time in the scheduler a step, with vLLM's own manager and with the service, in turns: prints JSON.

The service, which this program starts, has a journal. It is measured with memory of the engine's own, and with memory
that engines share, where what a session frees waits for its steps in flight.

    python -m engine.bench_scheduler [RUNNING...]     at 1, 8, 64, 256 and 512 running requests by default
        [--model plain | windows | states]            groups as of Llama; Gemma; LFM2, with states cached as vLLM does
        [--reserve-tokens N [N...]]                   each is measured in memory of the engine's own; -1: the default
        [--tcp | --delay-us N]                        in place of a unix socket; N is added to each message and answer:
                                                      110 makes 0.3 ms of round trip, see "echo_us"
        [--rounds 7]                                  of 40 steps each
    python -m engine.bench_scheduler images [STEPS]   random requests with priorities and images, 2,000 by default

A step is `schedule` and `update_from_output`; requests decode, and each that ends is followed by another of the same
kind, whose prompt is half shared. No model runs. With `images`, up to two requests arrive whenever none waits, with
up to 5,000 tokens of prompt, 500 of output and two images.

`waits` is how often a step waited for an answer; without a reserve for that of each message. `server_us_per_token` is
the processor time of the server's process, by its clock, which is read before and after each round. Beside "vllm" it is
what the server takes while it is idle.

With vLLM 0.33, set PYTHONPATH=tests:.venv-vllm-engine/vllm-0.33.0 and VLLM_TARGET_DEVICE=cpu.

Where the kernel has netem, `--tcp` in a network of its own shows a delay better than `--delay-us`, whose proxy needs
processor time:

    unshare -rn sh -c "ip link set lo up && tc qdisc add dev lo root netem delay 150us && exec PROGRAM --tcp"
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as Plain

from benchmarks.echo import Echo, serve_echo
from benchmarks.machine import processor_us
from engine.driving import STATES, Driver, Setup, images, make_scheduler
from engine.service import service
from kvpool.client.vllm import Scheduler
from kvpool.replay.children import server_child
from support import delay
from support.logging_process import LoggingProcess
from support.processes import PYTHON
from support.server import free_port

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 256
WARM_STEPS = 60
STEPS = 40
ROUNDS = 7
MODELS: Mapping[str, tuple[int, ...]] = {"plain": (0,), "windows": (0, *[512] * 5), "states": (0, *[STATES] * 3)}
"""The groups of each, see `Setup`."""


class Load:
    """A scheduler with `num_running` running requests.

    Attributes:
        times: Of each measured step, the seconds in `schedule` and in `update_from_output`.
        counts: What the measured steps came to: tokens, messages, waits by cause, time of the server.
    """

    def __init__(
        self, scheduler_class: Any, num_running: int, additional_config: dict[str, Any], model: str = "plain"
    ) -> None:
        self.times: list[tuple[float, float]] = []
        self.counts: Counter[str] = Counter()
        self._folder = tempfile.TemporaryDirectory()
        setup = Setup(
            num_blocks=2 * num_running * (PROMPT_TOKENS + OUTPUT_TOKENS) // 16 * len(MODELS[model]),
            windows=MODELS[model],
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            max_model_len=2048,
            additional_config=additional_config,
        )
        self.scheduler = make_scheduler(scheduler_class, setup, Path(self._folder.name))
        self._driver = Driver(self.scheduler, setup)
        self._num_running = num_running
        self._count = 0
        for _ in range(WARM_STEPS):
            self.step()

    def step(self) -> tuple[float, float]:
        """Runs a step; returns the seconds in `schedule` and in `update_from_output`."""
        while len(self.scheduler.running) + len(self.scheduler.waiting) < self._num_running:
            shared = [self._count % 4] * (PROMPT_TOKENS // 2)
            prompt = shared + [(self._count * 31 + i) % 512 for i in range(PROMPT_TOKENS // 2)]
            first = self._count < self._num_running
            spread = 1 + self._count * OUTPUT_TOKENS // self._num_running if first else OUTPUT_TOKENS
            self._driver.add(f"r{self._count}", prompt, max(spread, 2))
            self._count += 1
        return self._driver.timed_step()

    def round(self, server_pid: int) -> None:
        """Runs and measures steps."""
        self.counts.subtract(self._counters(server_pid))
        self.times += [self.step() for _ in range(STEPS)]
        time.sleep(0.02)  # lets the server handle a message in the background, whose time counts
        self.counts.update(self._counters(server_pid))

    def figures(self) -> dict[str, Any]:
        """What was measured, in microseconds per step or generated token."""
        steps_us = [1e6 * (a + b) for a, b in self.times]
        num_tokens, server_us, num_messages = (self.counts.pop(name) for name in ("tokens", "server_us", "messages"))
        return {
            "schedule_us": round(1e6 * statistics.median(t for t, _ in self.times)),
            "update_us": round(1e6 * statistics.median(t for _, t in self.times)),
            "step_us": round(statistics.median(steps_us)),
            "mean_step_us": round(statistics.fmean(steps_us)),
            "p99_step_us": round(statistics.quantiles(steps_us, n=100)[98]),
            "server_us_per_token": round(server_us / num_tokens, 2),
            "messages_per_token": round(num_messages / num_tokens, 4),
            "waits": dict(self.counts),
        }

    def _counters(self, server_pid: int) -> dict[str, int]:
        manager = self.scheduler.kv_cache_manager
        session = getattr(manager, "session", None)
        num_messages = session.sequence if session else 0
        return {
            "tokens": sum(map(len, self._driver.generated.values())),
            "server_us": round(processor_us(server_pid) or 0),
            "messages": num_messages,
            **(manager.calls.waits if session and session.reserve_tokens else {"exact": num_messages}),
        }

    def close(self) -> None:
        self.scheduler.shutdown()
        self._folder.cleanup()


def measure_images(address: str, num_steps: int) -> dict[str, Any]:
    """Seconds per side for the same random requests; images end the prediction of a round that does not know them."""
    kvpool = {"kvpool": {"address": address, "pool": f"bench.{os.getpid()}.images", "reserve_tokens": -1}}
    seconds = {}
    for name, scheduler_class, additional_config in (("vllm", Plain, {}), ("kvpool", Scheduler, kvpool)):
        setup = Setup(
            num_blocks=10_000,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            policy="priority",
            encoder_budget=8192,
            additional_config=additional_config,
        )
        rng = random.Random(42)
        with tempfile.TemporaryDirectory() as folder:
            scheduler = make_scheduler(scheduler_class, setup, Path(folder))
            driver = Driver(scheduler, setup)
            seconds[name] = 0.0
            for i in range(num_steps):
                for j in range(0 if scheduler.waiting else rng.randint(0, 2)):
                    prompt = rng.choices(range(100), k=rng.randint(1, 5000))
                    inputs = images(prompt, f"{i}.{j}")[: rng.randint(0, 2)]
                    priority = rng.randint(-3, 3)
                    driver.add(f"{i}.{j}", prompt, rng.randint(1, 500), priority=priority, mm_features=inputs)
                seconds[name] += sum(driver.timed_step())
            scheduler.shutdown()
    return {"steps": num_steps, **{name: round(each, 2) for name, each in seconds.items()}}


def measure(  # noqa: PLR0913 - one parameter per option
    num_running: int,
    address: str,
    server_pid: int = 0,
    *,
    model: str = "plain",
    reserve_tokens: Sequence[int] = (-1,),
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Figures of rounds that take turns, and the ratios of medians and means to vLLM alone."""
    kvpool = {"address": address, "pool": f"bench.{os.getpid()}.{num_running}"}
    shared = {**kvpool, "pool": f"{kvpool['pool']}.shared", "memory_id": "bench", "reserve_tokens": -1}
    loads = {"vllm": Load(Plain, num_running, {}, model)}
    for reserve in reserve_tokens:
        own = {**kvpool, "pool": f"{kvpool['pool']}.{reserve}", "reserve_tokens": reserve}
        name = "kvpool" if reserve < 0 else f"kvpool.reserve_{reserve}"
        loads[name] = Load(Scheduler, num_running, {"kvpool": own}, model)
    loads["shared memory"] = Load(Scheduler, num_running, {"kvpool": shared}, model)
    for _ in range(rounds):
        for load in loads.values():
            load.round(server_pid)
    result = {name: load.figures() for name, load in loads.items()}
    for name, load in loads.items():
        load.close()
        if name != "vllm":
            for figure in ("step_us", "mean_step_us"):
                result[name][f"ratio_of_{figure}"] = round(result[name][figure] / result["vllm"][figure], 3)
    return {"running": num_running, "model": model, **result}


@contextmanager
def served(*, is_tcp: bool, delay_us: float) -> Iterator[tuple[str, int]]:
    """Starts a service; yields its address and process. With TCP, prints the round trip of an echo."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = (Path(folder), "--journal", f"{folder}/journal")
        if not is_tcp:
            server = stack.enter_context(service(*options))
            yield server.address, server.pid
            return
        port = free_port(3)  # the service's, that of its steps, and that of an echo
        server = stack.enter_context(service(*options, address=f"127.0.0.1:{port}"))
        host = delay.CLIENTS if delay_us else delay.SERVER
        if delay_us:
            ports = map(str, range(port, port + 3))
            proxy = stack.enter_context(LoggingProcess(PYTHON, "-m", "support.delay", str(delay_us), *ports))
            proxy.wait_for("listening")
        with server_child(serve_echo, f"127.0.0.1:{port + 2}"):
            echo = Echo(f"{host}:{port + 2}")
            (times,) = echo.round(2000).values()
            echo.close()
        print(json.dumps({"delay_us": delay_us, "echo_us": round(statistics.median(times))}), flush=True)
        yield f"{host}:{port}", server.pid


def main(arguments: Sequence[str]) -> None:
    """Measures what the command line names, on a service of its own."""
    os.environ["KVPOOL_FRESH_PROCESSES"] = "1"  # the service is measured, too
    if arguments[:1] == ["images"]:
        with served(is_tcp=False, delay_us=0) as (address, _):
            print(json.dumps(measure_images(address, int(arguments[1]) if arguments[1:] else 2000)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("running", nargs="*", type=int, default=[1, 8, 64, 256, 512])
    parser.add_argument("--model", choices=MODELS, default="plain")
    parser.add_argument("--reserve-tokens", nargs="+", type=int, default=[-1])
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--delay-us", type=float, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = vars(parser.parse_args(arguments))
    running, is_tcp, delay_us = (given.pop(name) for name in ("running", "tcp", "delay_us"))
    with served(is_tcp=is_tcp or delay_us > 0, delay_us=delay_us) as server:
        for size in running:
            print(json.dumps(measure(size, *server, **given)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
