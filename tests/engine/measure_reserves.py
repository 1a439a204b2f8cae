"""What slots in reserve cost in vLLM's scheduler: hits of traces, and preemptions in pools that are too small.

    python -m engine.measure_reserves hits TRACE...   [--share 0.1] [--block-tokens 16] [--running 64] [--requests N]
    python -m engine.measure_reserves preemptions     [--seeds 20] [--running 32] [--requests 160]

Prints JSON. Compares vLLM alone, the service without a reserve, and the service with the default. Schedulers are a step
ahead of their outputs, as vLLM's default is; no model runs.

`hits` plays traces of Mooncake in order, with a number of requests at once, in a pool that holds a share of all their
prefixes. `preemptions` plays random requests, half of whose prompts begin with one of four prefixes, in pools that hold
0.3, 0.5 and 0.8 of as many requests as may run, each with all its tokens. `p` is that of a paired test over the seeds,
which flips signs; `ratio` is of the sums, and `interval` holds 95 % of the ratios of seeds that are drawn again.
"""

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Plain

from engine.driving import Driver, Setup, end_sessions, make_scheduler
from engine.measure_lending import tokens
from engine.service import service
from kvpool.client.vllm import AsyncScheduler
from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import MOONCAKE_ID_TOKENS, TraceRequest

WAYS: Mapping[str, int | None] = {"vllm": None, "no reserve": 0, "reserve": -1}
SHARES = (0.3, 0.5, 0.8)
DRAWS = 10_000
LONGEST_TOKENS = 131_072


def run(
    way: str, address: str, pool: str, setup: Mapping[str, Any], play: Callable[[Driver], None]
) -> tuple[Driver, int]:
    """Plays requests on a scheduler of their own; returns what drove it, and the number of messages."""
    reserve, config = WAYS[way], {}
    if reserve is not None:
        config = {"kvpool": {"address": address, "pool": f"{pool}.{way[:2]}", "reserve_tokens": reserve}}
    made = Setup(**setup, is_async=True, max_num_batched_tokens=8192, additional_config=config)
    with TemporaryDirectory() as folder:
        driver = Driver(make_scheduler(Plain if reserve is None else AsyncScheduler, made, Path(folder)), made)
        play(driver)
        driver.drain()
    session = getattr(driver.scheduler.kv_cache_manager, "session", None)
    num_messages = session.sequence if session else 0
    end_sessions()
    return driver, num_messages


def play_trace(driver: Driver, trace: Sequence[TraceRequest], num_running: int) -> None:
    """Plays a trace, and forgets requests that have ended, as all their tokens take gigabytes."""
    waiting = deque(enumerate(trace))
    running: set[str] = set()
    ended: list[str] = []
    while waiting or running:
        while waiting and len(running) < num_running:
            number, entry = waiting.popleft()
            driver.add(str(number), entry.token_ids(), entry.output_length)
            running.add(str(number))
        driver.timed_step()
        for name in ended:  # which the step in flight may have had
            del driver.requests[name], driver.generated[name]
        ended = [name for name in running if name not in driver.scheduler.requests]
        running.difference_update(ended)


def hits(path: Path, given: argparse.Namespace, address: str) -> dict[str, Any]:
    """Hit tokens of all that were looked up."""
    read = read_trace(path, given.requests)
    trace = [each for each in read if each.input_length + each.output_length <= LONGEST_TOKENS and each.output_length]
    num_ids = len({each for entry in trace for each in entry.hash_ids})
    setup = {
        "num_blocks": int(given.share * num_ids * MOONCAKE_ID_TOKENS / given.block_tokens),
        "block_size": given.block_tokens,
        "max_num_seqs": given.running,
        "max_model_len": LONGEST_TOKENS,
    }
    found: dict[str, Any] = {"trace": path.name, "requests": len(trace), "left_out": len(read) - len(trace), **setup}
    for way in WAYS:
        start = time.monotonic()
        driver, messages = run(way, address, path.name, setup, lambda it: play_trace(it, trace, given.running))
        lookups = driver.lookups
        found[way] = {
            "hit_percent": round(100 * lookups["hits"] / lookups["queries"], 3),
            **lookups,
            "messages": messages,
            "seconds": round(time.monotonic() - start),
        }
    return found


def draw_requests(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens follow each."""
    draw = random.Random(seed)
    prefixes = [tokens(draw, 128) for _ in range(4)]
    return [
        (draw.choice(prefixes) * draw.randrange(2) + tokens(draw, draw.randint(16, 256)), draw.randint(16, 384))
        for _ in range(count)
    ]


def play_requests(driver: Driver, requests: Sequence[tuple[list[int], int]]) -> None:
    """Puts all in at once, and runs steps until all have ended."""
    for number, (prompt, num_tokens) in enumerate(requests):
        driver.add(str(number), prompt, num_tokens)
    while not driver.is_idle:
        driver.timed_step()


def preemptions(share: float, given: argparse.Namespace, address: str, *, caches: bool) -> dict[str, Any]:
    """Preemptions per seed, and how they compare with vLLM's."""
    counts: dict[str, list[int]] = {way: [] for way in WAYS}
    messages = dict.fromkeys(WAYS, 0)
    start = time.monotonic()
    for seed in range(given.seeds):
        requests = draw_requests(seed, given.requests)
        needs = [(len(prompt) + num_tokens - 1) // 16 + 1 for prompt, num_tokens in requests]
        num_blocks = 1 + max(int(share * given.running * sum(needs) / len(needs)), *needs)
        setup = {"num_blocks": num_blocks, "max_num_seqs": given.running, "enable_caching": caches}
        for way, each in counts.items():
            pool = f"{seed}.{share}.{caches}"
            driver, sent = run(way, address, pool, setup, lambda it: play_requests(it, requests))  # noqa: B023 - called at once
            messages[way] += sent
            each.append(sum(request.num_preemptions for request in driver.requests.values()))
    ratios = {way: compared(counts["vllm"], each) for way, each in counts.items() if way != "vllm"}
    seconds = round(time.monotonic() - start)
    return {
        "share": share,
        "prefix_caching": caches,
        **ratios,
        "per_seed": counts,
        "messages": messages,
        "seconds": seconds,
    }


def compared(before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """The ratio of sums of pairs, an interval of 95 %, and the probability of such a difference by chance."""
    draw, pairs = random.Random(1), [*zip(before, after, strict=True)]

    def ratio(of: Sequence[tuple[int, int]]) -> float:
        return sum(b for _, b in of) / max(sum(a for a, _ in of), 1)

    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    differences = [b - a for a, b in pairs]
    most = sum(
        abs(sum(each * draw.choice((-1, 1)) for each in differences)) >= abs(sum(differences)) for _ in range(DRAWS)
    )
    interval = [round(drawn[int(DRAWS * each)], 4) for each in (0.025, 0.975)]
    return {"ratio": round(ratio(pairs), 4), "interval": interval, "p": round((most + 1) / (DRAWS + 1), 4)}


def main() -> None:
    """Measures what the command line names, on a service of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hits", "preemptions"))
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--running", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    with TemporaryDirectory() as folder, service(Path(folder), "--max-pools", str(2**20)) as server:
        if given.what == "hits":
            given.running = given.running or 64
            for path in given.traces:
                print(json.dumps(hits(path, given, server.address)), flush=True)
            return
        given.running, given.requests = given.running or 32, given.requests or 160
        for caches in (True, False):
            for share in SHARES:
                print(json.dumps(preemptions(share, given, server.address, caches=caches)), flush=True)


if __name__ == "__main__":
    main()
