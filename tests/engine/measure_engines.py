"""Tokens per second and time to first token of whole engines: vLLM alone and on the service, in turns. Prints JSON.

    python -m engine.measure_engines [IN_FLIGHT...]         1, 8 and 32 requests at once by default
        [--reserve-tokens N [N...]]                         a further engine for each; -1: the default
        [--rounds 10] [--requests N]                        of each round; by default more, the more there are at once

The engines have a tiny model, memory of their own and a worker process each, and schedule a step ahead. In a round each
answers the same new prompts, whose first half it has cached; when one ends, the next is sent. Fails if a token differs
from vLLM alone. Ratios are those of rounds: the median, the smallest and the largest. `server_us_per_token` is time of
the server's process by its clock; beside "vllm" it is what the server takes while it is idle.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.machine import processor_us
from engine.load import drawn
from engine.models import LLAMA, write_model
from engine.pairs import Engine
from engine.service import Service, service
from engine.serving import AHEAD, Answer, ServedEngine
from kvpool.client import connect


class Measured:
    """An engine, and what was measured of it: of each round tokens per second and the median time to the first one."""

    def __init__(self, engine: ServedEngine, pool: str, server: Service) -> None:
        self.engine, self._pool, self._server = engine, pool, server
        self.reset()

    def reset(self) -> None:
        """Forgets what was measured."""
        self.engine.wait_ready()
        self.figures: dict[str, list[float]] = {"tokens_per_s": [], "first_token_ms": []}
        self._num_tokens, self._server_us, self._first_message = 0, 0.0, self._num_messages()

    def _num_messages(self) -> int:
        if not self._pool:
            return 0
        with connect(self._server.address) as client:
            return client.get_pool(self._pool).activity.steps

    def answer(self, name: str, asked: Sequence[tuple[list[int], int]], in_flight: int) -> list[list[int]]:
        """Has it answer requests, some at once; returns their tokens."""
        time.sleep(1.5)  # workers of vLLM look for messages without a pause for a second after each
        waiting, running, answers = iter(enumerate(asked)), list[Answer](), list[Answer]()
        start_seconds, start_us = time.monotonic(), processor_us(self._server.pid) or 0.0
        while len(answers) < len(asked) or running:
            sent = [self.engine.ask(f"{name}.{i}", *each) for i, each in islice(waiting, in_flight - len(running))]
            answers, running = answers + sent, running + sent
            self.engine.wait_for_one(*running)
            running = [each for each in running if not each.is_finished]
        num_tokens = sum(len(each.tokens) for each in answers)
        self.figures["tokens_per_s"].append(num_tokens / (time.monotonic() - start_seconds))
        self.figures["first_token_ms"].append(1000 * statistics.median(each.first_seconds for each in answers))
        self._server_us += (processor_us(self._server.pid) or 0.0) - start_us
        self._num_tokens += num_tokens
        return [each.tokens for each in answers]

    def result(self, alone: "Measured") -> dict[str, object]:
        """Medians of rounds without the first, which warms up, and the ratios to vLLM alone."""
        found: dict[str, object] = {
            "server_us_per_token": round(self._server_us / self._num_tokens, 2),
            "messages_per_token": round((self._num_messages() - self._first_message) / self._num_tokens, 4),
        }
        for figure, rounds in self.figures.items():
            ratios = sorted(a / b for a, b in zip(rounds[1:], alone.figures[figure][1:], strict=True))
            shown = (statistics.median(ratios), ratios[0], ratios[-1])
            found |= {
                figure: round(statistics.median(rounds[1:]), 2),
                f"ratios_of_{figure}": [round(r, 3) for r in shown],
            }
        return found


def main() -> None:
    """Measures what the command line names, on a service of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("in_flight", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--reserve-tokens", nargs="+", type=int, default=[-1])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int)
    given = parser.parse_args()
    os.environ["KVPOOL_FRESH_PROCESSES"] = "1"  # the service is measured, too
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        write_model(LLAMA, folder / "model")
        server = stack.enter_context(service(folder, "--journal", f"{folder}/journal"))
        started = {}
        for pool, reserve in (("", 0), *((f"reserve_{each}", each) for each in given.reserve_tokens)):
            llm = Engine(LLAMA, 600, (), AHEAD | {"max_num_seqs": 32}).specification(folder / "model")["llm"]
            kvpool = {"address": server.address, "pool": pool, "reserve_tokens": reserve}
            llm["additional_config"] = {"kvpool": kvpool} if pool else {}
            started[pool] = stack.enter_context(ServedEngine(llm, folder / f"log{pool}"))
        engines = {pool: Measured(each, pool, server) for pool, each in started.items()}
        for size in given.in_flight:
            draw = random.Random(size)
            heads = [drawn(draw, 64) for _ in range(4)]
            for i in range(given.rounds + 1):
                asked = [
                    (draw.choice(heads) + drawn(draw, 64), draw.randint(32, 96))
                    for _ in range(given.requests or 16 + 4 * size)
                ]
                order = reversed(engines.values()) if i % 2 else engines.values()
                first, *others = [each.answer(f"{size}.{i}", asked, size) for each in order]
                assert all(each == first for each in others), "the tokens differ"
            results = {pool or "vllm": each.result(engines[""]) for pool, each in engines.items()}
            print(json.dumps({"in_flight": size, **results}), flush=True)
            for each in engines.values():
                each.reset()


if __name__ == "__main__":
    main()
