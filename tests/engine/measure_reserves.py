"""What slots in reserve cost in vLLM's scheduler: hits of traces, and preemptions in pools that are too small.

    python -m engine.measure_reserves hits TRACE...     traces of Mooncake, with 64 requests at once by default
        [--share 0.1]                                   of all their prefixes, which the pool holds
    python -m engine.measure_reserves preemptions       random requests, of which 32 at once may run by default
        [--seeds 20]
    both: [--running N] [--requests N]

Prints JSON: figures of vLLM alone, of the service without a reserve, and with the default. Schedulers are a step ahead
of their outputs, as vLLM's default is; no model runs.

Half of the random prompts begin with one of four prefixes. The pools hold 0.3, 0.5 and 0.8 of what as many requests as
may run hold with all their tokens. `ratio` is that of the sums over the seeds, and 95 % of the ratios of seeds that are
drawn again are in `interval`.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Plain

from engine.driving import Driver, Setup, end_sessions, make_scheduler
from engine.load import drawn
from engine.service import service
from kvpool.client.vllm import AsyncScheduler
from kvpool.replay.trace import read_trace

WAYS: Mapping[str, int | None] = {"vllm": None, "no reserve": 0, "reserve": -1}
BLOCK_TOKENS = 16
DRAWS = 10_000


Requests = Iterable[tuple[list[int], int]]
"""Prompts, and how many tokens follow each."""


def run(address: str, way: str, setup: dict[str, Any], requests: Requests, at_once: int) -> dict[str, Any]:
    """Plays requests on a scheduler of their own; returns what they came to.

    Requests that have ended are forgotten, as all tokens of a trace take gigabytes.
    """
    start_seconds, num_preemptions, is_plain = time.monotonic(), 0, WAYS[way] is None
    kvpool = {"address": address, "pool": f"{time.monotonic_ns()}", "reserve_tokens": WAYS[way]}
    settings = {} if is_plain else {"kvpool": kvpool}
    made = Setup(**setup, is_async=True, max_num_batched_tokens=8192, additional_config=settings)
    waiting, running, ended = enumerate(requests), set[str](), set[str]()
    with TemporaryDirectory() as folder:
        scheduler = make_scheduler(Plain if is_plain else AsyncScheduler, made, Path(folder))
        driver = Driver(scheduler, made)
        while True:
            for number, request in islice(waiting, at_once - len(running)):
                driver.add(str(number), *request)
                running.add(str(number))
            if not driver.requests:
                break
            driver.timed_step()
            for name in ended:  # which the step in flight may have had
                num_preemptions += driver.requests.pop(name).num_preemptions
                del driver.generated[name]
            ended = {name for name in running if name not in scheduler.requests}
            running -= ended
        driver.drain()
    num_messages = 0 if is_plain else scheduler.kv_cache_manager.session.sequence
    end_sessions()
    seconds = round(time.monotonic() - start_seconds, 1)
    return {**driver.lookups, "preemptions": num_preemptions, "messages": num_messages, "seconds": seconds}


def hits(path: Path, given: argparse.Namespace, address: str) -> dict[str, Any]:
    """Plays a trace each way; returns the share of the tokens looked up that were hit."""
    trace = read_trace(path, given.requests)
    num_tokens = trace[0].id_tokens * len({each for request in trace for each in request.hash_ids})
    num_blocks, running = int(given.share * num_tokens / BLOCK_TOKENS), given.running or 64
    setup = {"num_blocks": num_blocks, "max_num_seqs": running, "max_model_len": 131_072}
    found: dict[str, Any] = {"trace": path.name, "requests": len(trace), **setup}
    for way in WAYS:
        requests = ((each.token_ids(), each.output_length) for each in trace)
        figures = run(address, way, setup, requests, running)
        found[way] = {"hit_percent": round(100 * figures["hits"] / figures["queries"], 3), **figures}
    return found


def preemptions(share: float, given: argparse.Namespace, address: str, *, caches: bool) -> dict[str, Any]:
    """Plays random requests each way, all sent at once; compares the preemptions with vLLM's."""
    counts: dict[str, list[int]] = {way: [] for way in WAYS}
    messages = dict.fromkeys(WAYS, 0)
    running = given.running or 32
    for seed in range(given.seeds):
        draw = random.Random(seed)
        prefixes = [drawn(draw, 128) for _ in range(4)]
        requests = [
            (draw.choice(prefixes) * draw.randrange(2) + drawn(draw, draw.randint(16, 256)), draw.randint(16, 384))
            for _ in range(given.requests or 160)
        ]
        needs = [-(-(len(prompt) + num_tokens) // BLOCK_TOKENS) for prompt, num_tokens in requests]
        num_blocks = 1 + max(int(share * running * sum(needs) / len(needs)), *needs)
        setup = {"num_blocks": num_blocks, "max_num_seqs": running, "enable_caching": caches}
        for way in WAYS:
            figures = run(address, way, setup, requests, len(requests))
            counts[way].append(figures["preemptions"])
            messages[way] += figures["messages"]
    ratios = {way: compared(counts["vllm"], each) for way, each in counts.items()}
    return {"share": share, "prefix_caching": caches, **ratios, "per_seed": counts, "messages": messages}


def compared(before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """The ratio of sums of pairs, and where it lies in 95 % of draws of such pairs."""
    draw, pairs = random.Random(1), [*zip(before, after, strict=True)]

    def ratio(of: Sequence[tuple[int, int]]) -> float:
        return round(sum(b for _, b in of) / max(sum(a for a, _ in of), 1), 4)

    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return {"ratio": ratio(pairs), "interval": [drawn[DRAWS // 40], drawn[-DRAWS // 40]]}


def main() -> None:
    """Measures what the command line names, on a service of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hits", "preemptions"))
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--share", type=float, default=0.1)
    for name, default in (("running", None), ("requests", None), ("seeds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with TemporaryDirectory() as folder, service(Path(folder), "--max-pools", str(2**20)) as server:
        for path in given.traces:
            print(json.dumps(hits(path, given, server.address)), flush=True)
        for caches in (True, False) * (given.what == "preemptions"):
            for share in (0.3, 0.5, 0.8):
                print(json.dumps(preemptions(share, given, server.address, caches=caches)), flush=True)


if __name__ == "__main__":
    main()
