"""Time in the scheduler a step, with vLLM's own manager and with the service, in turns: prints JSON.

The service, which this program starts, has a journal. It is measured with memory of the engine's own, and with memory
that engines share, where what a session frees waits for its steps in flight.

    python -m engine.bench_scheduler [RUNNING...]     at 1, 8, 64 and 256 running requests by default
    python -m engine.bench_scheduler images [STEPS]   random requests with priorities and images, 2,000 by default

A step is `schedule` and `update_from_output`; requests decode, and each that ends is followed by another of the same
kind, whose prompt is half shared. No model runs. With `images`, up to two requests arrive whenever none waits, with
up to 5,000 tokens of prompt, 500 of output and two images.
"""

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Driver, Setup, images, make_scheduler
from engine.service import service
from kvpool.client.vllm import Scheduler

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 256
WARM_STEPS = 60
STEPS = 40
ROUNDS = 7


class Load:
    """A scheduler with `num_running` running requests."""

    def __init__(self, scheduler_class: Any, num_running: int, additional_config: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        setup = Setup(
            num_blocks=2 * num_running * (PROMPT_TOKENS + OUTPUT_TOKENS) // 16,
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


def measure(num_running: int, address: str) -> dict[str, Any]:
    """Medians in microseconds, and the ratio of the sums, of rounds that take turns."""
    kvpool = {"address": address, "pool": f"bench.{os.getpid()}.{num_running}", "reserve_tokens": -1}
    shared = {**kvpool, "pool": f"{kvpool['pool']}.shared", "memory_id": "bench"}
    loads = {
        "vllm": Load(Plain, num_running, {}),
        "kvpool": Load(Scheduler, num_running, {"kvpool": kvpool}),
        "shared memory": Load(Scheduler, num_running, {"kvpool": shared}),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
    for _ in range(ROUNDS):
        for name, load in loads.items():
            times[name] += [load.step() for _ in range(STEPS)]
    for load in loads.values():
        load.close()
    result: dict[str, Any] = {"running": num_running}
    for name, each in times.items():
        result[name] = {
            "schedule_us": round(1e6 * statistics.median(t for t, _ in each)),
            "update_us": round(1e6 * statistics.median(t for _, t in each)),
            "step_us": round(1e6 * statistics.median(a + b for a, b in each)),
            "mean_step_us": round(1e6 * statistics.fmean(a + b for a, b in each)),
        }
    for name in ("kvpool", "shared memory"):
        for figure in ("step_us", "mean_step_us"):
            result[name][f"ratio_of_{figure}"] = round(result[name][figure] / result["vllm"][figure], 3)
    return result


def main(arguments: Sequence[str]) -> None:
    """Measures what the command line names, on a service of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        service(Path(folder), "--journal", f"{folder}/journal") as server,
    ):
        if arguments[:1] == ["images"]:
            print(json.dumps(measure_images(server.address, int(arguments[1]) if arguments[1:] else 2000)))
            return
        for size in [int(argument) for argument in arguments] or [1, 8, 64, 256]:
            print(json.dumps(measure(size, server.address)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
