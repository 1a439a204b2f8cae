"""Transcripts: the results that the core gave to random commands. Every later core must give the same.

A transcript is a bz2 file of JSON lines. The first line holds the arguments of `Traffic` and the number of commands.
Each other line holds a result. The commands are made again from the seed and the results.

In `tests`, with the four source roots on PYTHONPATH:

    python -m transcripts.transcript record PATH --commands 1000000 --seed 1
    python -m transcripts.transcript replay PATH
"""

import argparse
import bz2
import json
import sys
from pathlib import Path
from typing import Final

from transcripts.player import Player
from transcripts.traffic import Json, Traffic

STATE_INTERVAL: Final = 200
"""Number of commands between digests of the state."""


def record(path: Path, num_commands: int, seed: int) -> None:
    """Makes a transcript of the current core."""
    header = {"commands": num_commands, "seed": seed}
    with bz2.open(path, "wt", encoding="ascii") as file:
        file.write(_line(header))
        traffic = Traffic(seed)
        for result in traffic.commands(Player().execute, num_commands, STATE_INTERVAL):
            file.write(_line(result))


def replay(path: Path, num_commands: int | None = None) -> int:
    """Executes the commands of a transcript, or the first of them, and compares the results.

    Returns:
        The number of commands.

    Raises:
        AssertionError: A result differs.
    """
    player = Player()
    with bz2.open(path, "rt", encoding="ascii") as file:
        header = json.loads(next(file))
        count = min(num_commands or header["commands"], header["commands"])

        def execute(command: dict[str, Json]) -> Json:
            expected, found = next(file), player.execute(command)
            if _line(found) != expected:
                raise AssertionError(f"{path.name}: {command}\nexpected {expected}found    {_line(found)}")
            result: Json = json.loads(expected)
            return result

        traffic = Traffic(header["seed"])
        return sum(1 for _ in traffic.commands(execute, count, STATE_INTERVAL))


def _line(value: Json) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("action", choices=["record", "replay"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--commands", type=int, default=None, help="default: 100000 to record, all to replay")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.action == "record":
        record(arguments.path, arguments.commands or 100_000, arguments.seed)
    else:
        sys.stdout.write(f"{replay(arguments.path, arguments.commands)} commands: equal\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
