"""Random schedules of a shard: `PYTHONPATH=tests python tests/simulation/shard/run.py --schedules 100000`."""

import argparse
from time import perf_counter

from simulation.shard.world import World

STEPS = 600


def run(world: type[World], seeds: range) -> int:
    """Runs a schedule per seed; returns the number of terms that began.

    Raises:
        BrokenPromiseError: A promise of the protocol was broken.
    """
    num_terms = 0
    for seed in seeds:
        ran = world(seed, num_servers=2 + seed % 2)
        ran.run(STEPS)
        num_terms += len(ran.primaries)
    return num_terms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    start = perf_counter()
    num_terms = run(World, range(arguments.first_seed, arguments.first_seed + arguments.schedules))
    seconds = perf_counter() - start
    print(f"{arguments.schedules} schedules, {num_terms} terms, no promise broken, {seconds:.0f} s")  # noqa: T201 - a program


if __name__ == "__main__":
    main()
