"""What host memory gives to real vLLM engines: chats of three turns in a first tier of a quarter of what they use.

    python -m engine.measure_host_tier [--rounds 5]

Each round has engines of its own, in a random order. Prints medians over the rounds as tables for the documentation,
and all figures as JSON on the last line.

The first table is of chats that come back: hit rate and time to first token of turns two and three. vLLM's own second
tiers need CUDA. The second table is of chats that all fit the first tier: four engines answer the same chats one after
the other, and the ratios are those of their times. Two of the engines are alike: their ratio shows the noise.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.load import Revisits, hit_rate
from engine.measure_lending import LARGER_MODEL
from engine.models import LLAMA
from engine.service import service
from engine.serving import Answer, ServedEngine, Site, site

NUM_BLOCKS, NUM_HOST_BLOCKS = 180, 720
"""The tiers; the chats fill about 720 blocks."""
BLOCK_BYTES = 2 * 2 * 64 * 4 * 32 * 4
"""Keys and values, two heads of 64 numbers of 4 bytes, 32 tokens, 4 layers."""
CHATS = Revisits(24, num_at_once=2, question_tokens=270)
FITTING_BLOCKS, NUM_REPEATS = 2400, 16
OPTIONS = {"hf_overrides": LARGER_MODEL, "max_model_len": 2048, "max_num_batched_tokens": 2048}


@contextmanager
def place(name: str, num_blocks: int, num_host_blocks: int = 0) -> Iterator[Site]:
    """A service and a lender of their own."""
    flags = ("--host-memory", f"{num_host_blocks * BLOCK_BYTES}B") if num_host_blocks else ()
    with (
        TemporaryDirectory() as folder,
        service(Path(folder)) as server,
        site(server.address, num_blocks, name, model=LLAMA, lender_flags=flags) as started,
    ):
        yield started


def warm(engines: Sequence[ServedEngine]) -> None:
    """Has each engine answer what no figure counts."""
    for engine in engines:
        engine.wait(engine.ask("warm", range(3, 400), 4))


def revisits(*engines: ServedEngine) -> dict[str, float]:
    """Figures of chats that come back."""
    warm(engines)
    _, *turns = CHATS.run(*engines)
    answers: list[Answer] = [each for turn in turns for each in turn]
    first = sorted(1000 * each.first_seconds for each in answers)
    return {
        "hit rate": hit_rate(answers),
        "first token, median ms": statistics.median(first),
        "first token, mean ms": statistics.fmean(first),
        "first token, 95 % ms": first[len(first) * 95 // 100],
    }


def alone() -> dict[str, float]:
    with place("alone", NUM_BLOCKS) as here:
        return revisits(*here.engines(1, is_attached=False, options=OPTIONS))


def one_tier() -> dict[str, float]:
    with place("one", NUM_BLOCKS) as here:
        return revisits(*here.engines(1, options=OPTIONS))


def two_tiers() -> dict[str, float]:
    with place("two", NUM_BLOCKS, NUM_HOST_BLOCKS) as here:
        return revisits(*here.engines(1, options=OPTIONS))


def two_engines_on_shared_tiers() -> dict[str, float]:
    with place("shared", NUM_BLOCKS, NUM_HOST_BLOCKS) as here:
        return revisits(*here.engines(2, options=OPTIONS))


def two_engines_with_half_each() -> dict[str, float]:
    with ExitStack() as stack:
        halves = [stack.enter_context(place(f"half{i}", NUM_BLOCKS // 2, NUM_HOST_BLOCKS // 2)) for i in range(2)]
        return revisits(*(here.engines(1, options=OPTIONS)[0] for here in halves))


WAYS = {
    "vLLM alone": alone,
    "kvpool, first tier only": one_tier,
    "kvpool, both tiers": two_tiers,
    "two engines on both tiers": two_engines_on_shared_tiers,
    "two engines, half of both tiers each": two_engines_with_half_each,
}


def fitting(draw: random.Random) -> dict[str, float]:
    """Seconds of chats that fit the first tier, as ratios to those of kvpool without host memory."""
    with ExitStack() as stack:
        one, again = (stack.enter_context(place(name, FITTING_BLOCKS)) for name in ("one", "again"))
        both = stack.enter_context(place("both", FITTING_BLOCKS, NUM_HOST_BLOCKS))
        engines = {
            "first tier only": one.engine(options=OPTIONS),
            "the same again": again.engine(options=OPTIONS),
            "both tiers": both.engine(options=OPTIONS),
            "vLLM alone": one.engine(is_attached=False, options=OPTIONS),
        }
        warm([*engines.values()])
        seconds = dict.fromkeys(engines, 0.0)
        for repeat in range(NUM_REPEATS):
            chats = Revisits(4, num_at_once=2, question_tokens=270, seed=repeat)
            for name in draw.sample(sorted(engines), len(engines)):
                began = time.perf_counter()
                chats.run(engines[name], name=f"{repeat} ")
                seconds[name] += time.perf_counter() - began
    plain = seconds.pop("first tier only")
    return {f"{name} to first tier only": each / plain for name, each in seconds.items()}


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    draw, found = random.Random(1), {name: list[dict[str, float]]() for name in (*WAYS, "fitting")}
    for number in range(parser.parse_args().rounds):
        for name in draw.sample(sorted(WAYS), len(WAYS)):
            found[name].append(WAYS[name]())
        found["fitting"].append(fitting(draw))
        print(number, json.dumps({name: each[-1] for name, each in found.items()}), flush=True)
    for names in (tuple(WAYS), ("fitting",)):
        columns = [*found[names[0]][0]]
        print("\n| | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
        for name in names:
            medians = [statistics.median(each[column] for each in found[name]) for column in columns]
            print(f"| {name} | " + " | ".join(f"{each:.3f}" if each < 2 else f"{each:.0f}" for each in medians) + " |")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
