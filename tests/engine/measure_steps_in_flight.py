"""What two schedulers on one memory lose by the rules for steps in flight: hits, rounds and time. Prints JSON.

    python -m engine.measure_steps_in_flight [BLOCKS...]

Chats of several turns go to one of two schedulers of vLLM that schedule a step ahead. Each turn begins as soon as the
turn before has ended, so requests end, and blocks are freed, while steps are in flight. Prints for each size of the
pool what comes of it with memory that the schedulers share; with the same on a server without the rules, which gives
blocks away too early; with a pool each, of half of the blocks; and with vLLM's managers, of half of the blocks each. No
model runs. Of the same version of vLLM, all figures but the times are the same in each run.
"""

import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from engine.driving import Driver, Setup, make_scheduler
from engine.load import drawn
from engine.measure_lending import percentiles
from kvpool.client.vllm import Scheduler
from support.logging_process import LoggingProcess
from support.processes import PYTHON

NUM_CHATS, NUM_TURNS, CHATS_AT_ONCE = 120, 5, 24
SYSTEM_TOKENS = 256
BLOCK_TOKENS = 16
RULES = "from kvpool.cli import main; main()"
NO_RULES = (
    "from kvpool.core.blocks.steps_in_flight import StepsInFlight;"
    f"StepsInFlight.begin_frees = lambda *_, **__: None; {RULES}"
)


class Chat:
    """A chat.

    Attributes:
        name: Its name.
        tokens: What was said so far.
        turns: Of each turn that is left: the question, the number of tokens of the answer, and the scheduler.
    """

    def __init__(self, name: str, draw: random.Random, systems: Sequence[Sequence[int]]) -> None:
        self.name = name
        self.tokens = [*draw.choice(systems)]
        self.turns = deque(
            (drawn(draw, draw.randint(20, 120)), draw.randint(8, 120), draw.randrange(2)) for _ in range(NUM_TURNS)
        )


def run(drivers: Sequence[Driver]) -> dict[str, Any]:
    """Plays all chats on two schedulers, whose steps alternate."""
    draw = random.Random(1)
    systems = [drawn(draw, SYSTEM_TOKENS) for _ in range(5)]
    waiting = deque(Chat(str(i), draw, systems) for i in range(NUM_CHATS))
    talking: dict[str, tuple[Chat, Driver]] = {}
    rounds = prompt_tokens = 0
    times: list[float] = []

    def ask(chat: Chat) -> None:
        nonlocal prompt_tokens
        question, num_tokens, route = chat.turns.popleft()
        chat.tokens += question
        name = f"{chat.name}.{len(chat.turns)}"
        prompt_tokens += len(chat.tokens)
        drivers[route].add(name, chat.tokens, num_tokens)
        talking[name] = chat, drivers[route]

    while waiting or talking:
        while waiting and len(talking) < CHATS_AT_ONCE:
            ask(waiting.popleft())
        times += [sum(driver.timed_step()) for driver in drivers]
        rounds += 1
        for name, (chat, driver) in [*talking.items()]:
            if name not in driver.scheduler.requests:
                del talking[name]
                chat.tokens += driver.generated[name]
                if chat.turns:
                    ask(chat)
    for driver in drivers:
        driver.drain()
        driver.scheduler.shutdown()
    return {
        "prompt_tokens": prompt_tokens,
        "hit_tokens": sum(sum(driver.cached.values()) for driver in drivers),
        "preemptions": sum(driver.lookups["preempted_requests"] for driver in drivers),
        "rounds": rounds,
        "mean_ms": round(1000 * statistics.fmean(times), 3),
        **percentiles(times),
    }


def measure(scheduler_class: Any, num_blocks: int, settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs the chats on schedulers of a class, with settings each."""
    with ExitStack() as stack:
        drivers = []
        for additional_config in settings:
            setup = Setup(
                num_blocks=num_blocks,
                max_num_seqs=CHATS_AT_ONCE,
                max_num_batched_tokens=2048,
                max_model_len=2048,
                is_async=True,
                additional_config=additional_config,
            )
            folder = Path(stack.enter_context(TemporaryDirectory()))
            drivers.append(Driver(make_scheduler(scheduler_class, setup, folder), setup))
        return run(drivers)


def main() -> None:
    """Measures each size."""
    for num_blocks in [int(each) for each in sys.argv[1:]] or [4096, 1024, 640, 448, 320]:
        found: dict[str, Any] = {"blocks": num_blocks}
        for name, program, pools in (
            ("shared", RULES, ("shared", "shared")),
            ("shared, without the rules", NO_RULES, ("shared", "shared")),
            ("a pool each", RULES, ("a", "b")),
        ):
            with TemporaryDirectory() as folder:
                address = f"unix:{folder}/s"
                with LoggingProcess(PYTHON, "-c", program, "serve", "--listen", address, "--no-journal") as server:
                    server.wait_for("server listening")
                    settings = [
                        {"kvpool": {"address": address, "pool": pool, "memory_id": "measured"}} for pool in pools
                    ]
                    found[name] = measure(Scheduler, num_blocks // len({*pools}), settings)
        found["vLLM"] = measure(AsyncScheduler, num_blocks // 2, [{}, {}])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
