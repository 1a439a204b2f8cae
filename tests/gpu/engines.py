"""Engines on lent memory, and what is lost when a process is killed: an engine, the server, the worker; and an upgrade.

Every token is compared with that of a model without a cache. Prints one JSON object.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from examples.reference_engine.dense import DenseModel
from gpu.engine import CONFIG, POOL
from kvpool.client import Client, connect
from kvpool.gpu_worker.device import open_device
from support.lending import LenderProcess
from support.server import ServerProcess

LIMIT_SECONDS: Final = 60.0
LENDER_MEMORY: Final = "600MiB"
OUTPUT_TOKENS: Final = 8
LONG_OUTPUT_TOKENS: Final = 48


class Engine:
    """An engine in a process group of its own.

    Attributes:
        start_seconds: Time until it could generate: Python, torch, the device, the map.
        epoch: Epoch of its session.
    """

    def __init__(self, server: str, lender: LenderProcess, device: str) -> None:
        begun = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu.engine", server, lender.address, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.epoch: int = self.read()["epoch"]
        self.start_seconds = time.monotonic() - begun

    def __call__(self, prompts: list[list[int]], output_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
        """Generates."""
        self.send(prompts, output_tokens)
        return self.read()

    def send(self, prompts: list[list[int]], output_tokens: int = OUTPUT_TOKENS) -> None:
        """Begins to generate."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "output_tokens": output_tokens}) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Waits for what was generated."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> float:
        """Kills all its processes; returns when."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        killed = time.monotonic()
        self._process.wait()
        return killed


class Site:
    """A server with a journal, a worker that lends, and engines.

    Attributes:
        engines: All that were started.
        known: Prompts that engines share.
    """

    def __init__(self, folder: Path, device: torch.device, prompt_tokens: int) -> None:
        self._folder = folder
        self.device = device
        self.engines: list[Engine] = []
        self._model = DenseModel(CONFIG, device)
        self._source = random.Random(7)  # noqa: S311 - prompts
        self._prompt_tokens = prompt_tokens
        self.known = self.prompts(3)
        self.start_server()
        self.start_lender()
        self.client: Client = connect(self.server.addresses[0])

    def start_server(self) -> None:
        """Starts the server, at first or after it was killed."""
        self.server = ServerProcess(f"unix:{self._folder}/server", journal={"folder": f"{self._folder}/journal"})

    def start_lender(self, *options: str) -> None:
        """Starts the worker, at first or after it has ended."""
        flags = *options, "--device", str(self.device), "--memory", LENDER_MEMORY
        self.lender = LenderProcess(self.server.addresses[0], self._folder, 0, 1, *flags, pool=POOL)

    def start_engine(self) -> Engine:
        """Starts an engine."""
        self.engines.append(engine := Engine(self.server.addresses[0], self.lender, str(self.device)))
        return engine

    def check(self, result: dict[str, Any], prompts: list[list[int]]) -> None:
        """Checks that each prompt got the tokens of the model without a cache."""
        outputs = result["outputs"]
        assert len(outputs) == len(prompts), f"{len(outputs)} of {len(prompts)} requests ended"
        for prompt, output in outputs:
            expected = self._model.greedy_tokens(prompt + output, len(prompt))[:-1]
            assert output == expected, "tokens differ from those of a model without a cache"

    def run_known(self, engine: Engine) -> dict[str, Any]:
        """Has an engine generate for a prompt that another has computed."""
        result = engine([self.known[0]])
        self.check(result, [self.known[0]])
        assert result["hit_tokens"], "the prompt is cached"
        return result

    def begin(self, engine: Engine, prompts: list[list[int]], output_tokens: int) -> int:
        """Has an engine begin to generate; returns the number of free blocks before."""
        free = self.free_blocks()
        engine.send(prompts, output_tokens)
        _wait_until(lambda: self.free_blocks() < free, "the engine generates")
        return free

    def prompts(self, count: int) -> list[list[int]]:
        """New prompts."""
        tokens = range(self._prompt_tokens)
        return [[self._source.randrange(CONFIG.vocab_size) for _ in tokens] for _ in range(count)]

    def free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self.client.get_pool(POOL).free_blocks

    def close(self) -> None:
        """Ends all processes."""
        self.client.close()
        for engine in self.engines:
            engine.kill()
        for process in (self.lender.process, self.server.process):  # the worker frees the memory
            process.terminate()
            process.wait()


def shared_prefixes(site: Site) -> dict[str, object]:
    """The second engine hits what the first has computed."""
    first, second = site.start_engine(), site.start_engine()
    for engine in (first, second):  # the device loads its kernels
        engine(site.prompts(1))
    cold, warm = [], []
    for prompt in site.known:
        cold.append(first([prompt]))
        warm.append(second([prompt]))
        site.check(cold[-1], [prompt])
        site.check(warm[-1], [prompt])
        assert cold[-1]["hit_tokens"] == 0, "the prompt is new"
        assert warm[-1]["shared_hit_tokens"] >= len(prompt) - 2 * CONFIG.block_size, "all full blocks are hit"
    return {
        "prompt_tokens": len(site.known[0]),
        "start_of_an_engine_s": round(second.start_seconds, 1),
        "first_token_cold_ms": _middle(cold),
        "first_token_warm_in_another_engine_ms": _middle(warm),
    }


def killed_engine(site: Site) -> dict[str, object]:
    """The blocks of a killed engine are free, and what it shares stays cached."""
    first, second = site.engines
    free = site.begin(second, site.prompts(4), 1000)
    killed = second.kill()
    _wait_until(lambda: site.free_blocks() >= free, "the blocks of the killed engine are free")
    freed = time.monotonic()
    other = site.run_known(first)
    successor = site.run_known(site.start_engine())
    return {
        "engine_killed_blocks_free_after_ms": round(1000 * (freed - killed)),
        "engine_killed_warm_token_of_another_after_ms": round(1000 * (other["first_token_at"] - killed)),
        "engine_killed_warm_token_of_its_successor_after_s": round(successor["first_token_at"] - killed, 1),
    }


def killed_server(site: Site) -> dict[str, object]:
    """An engine that generates continues with the next process of the server, and the cache is warm."""
    first, _, third = site.engines
    work = site.prompts(4)
    site.begin(first, work, LONG_OUTPUT_TOKENS)
    site.server.process.kill()
    site.server.process.communicate()
    site.start_server()
    after = first.read()
    site.check(after, work)
    site.run_known(third)
    return {"server_killed_longest_gap_ms": round(after["longest_gap_ms"])}


def killed_worker(site: Site) -> dict[str, object]:
    """The memory outlives a worker that is killed."""
    return _next_worker(site, "worker_killed", signal.SIGKILL, "--keep-memory")


def upgraded_worker(site: Site) -> dict[str, object]:
    """The memory outlives a worker that is stopped with `--keep-memory`; the next one frees it when it is stopped."""
    return _next_worker(site, "worker_upgraded", signal.SIGTERM)


def _next_worker(site: Site, name: str, ends_by: signal.Signals, *options: str) -> dict[str, object]:
    """An engine that generates continues with the next worker, and the cache is warm for a new engine."""
    running = site.engines[-1]
    work = site.prompts(4)
    site.begin(running, work, LONG_OUTPUT_TOKENS)
    site.lender.process.send_signal(ends_by)
    ended = time.monotonic()
    site.lender.end()
    site.start_lender(*options)
    after = running.read()
    site.check(after, work)
    for engine in site.engines:
        engine.kill()
    last = site.start_engine()
    assert last.epoch == running.epoch, "the epoch continues"
    successor = site.run_known(last)
    return {
        f"{name}_longest_gap_ms": round(after["longest_gap_ms"]),
        f"{name}_warm_token_of_a_new_engine_after_s": round(successor["first_token_at"] - ended, 1),
    }


def _middle(results: list[dict[str, Any]]) -> float:
    return round(float(sorted(result["first_token_ms"] for result in results)[len(results) // 2]), 1)


def _wait_until(is_met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_met():
        assert time.monotonic() < deadline, f"not within {LIMIT_SECONDS:g} s: {what}"
        time.sleep(0.001)  # the time until it is met is printed in milliseconds


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = open_device(parser.parse_args().device)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        site = Site(Path(folder), device, prompt_tokens=128 if device.type == "cpu" else 2048)
        with contextlib.closing(site):
            figures: dict[str, object] = {}
            for check in (shared_prefixes, killed_engine, killed_server, killed_worker, upgraded_worker):
                figures |= check(site)
                sys.stderr.write(f"{check.__name__}: passed\n")
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
