"""Memory of a device in use before and after engines of vLLM on lent memory are killed. Prints one JSON object."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from engine.workloads import Request
from gpu.native_engine import LENT, Place, closed_by_sigterm
from kvpool.client import connect
from support.waiting import wait_until

POOL: Final = "restarted"
SIZES: Final = {"cuda": (3 * 2**30, 4, 5), "cpu": (2**27, 1, 2)}
"""Memory for keys and values in bytes, rounds, engines that are killed in each."""


def restarts(place: Place, device: str) -> dict[str, object]:
    """Memory in use before and after engines of two layers were killed, some at once; one more came first."""
    memory_bytes, rounds, at_once = SIZES[device.partition(":")[0]]
    place.kind = replace(place.kind, memory_bytes=memory_bytes)
    place.options = {**place.options, "hf_overrides": {"num_hidden_layers": 2}, "enforce_eager": True}
    before = 0.0
    with connect(place.server) as client:
        for count in (1, *[at_once] * rounds):
            engines = [place.serve(LENT, POOL) for _ in range(count)]
            for engine in engines:
                engine.wait_ready(place.kind.start_seconds)
                engine.complete(Request(tuple(range(3, 100)), 4))
            for engine in engines:
                engine.kill()
            wait_until(lambda: client.get_pool(POOL).sessions == 0, "the sessions of killed engines end")
            folder = Path(engines[0].process.command[engines[0].process.command.index("--uds") + 1]).parent / POOL
            before = before or settled_mib(device, folder)
    wait_until(lambda: used_mib(device, folder) <= before, f"more is in use than the {before} MiB before")
    return {"restarts": rounds * at_once, "used_mib_before": before, "used_mib_after": used_mib(device, folder)}


def settled_mib(device: str, folder: Path) -> float:
    """Memory in use, when two samples agree: a driver frees that of a killed process some time later."""
    samples = [used_mib(device, folder)]

    def is_settled() -> bool:
        time.sleep(1)
        samples.append(used_mib(device, folder))
        return samples[-1] == samples[-2]

    wait_until(is_settled, "the memory in use does not settle")
    return samples[-1]


def used_mib(device: str, folder: Path) -> float:
    """Memory of the device in use, as nvidia-smi shows it; on CPU that of the files in a folder."""
    if device == "cpu":
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", device.partition(":")[2]]
    return float(subprocess.check_output(query, text=True))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    with closed_by_sigterm() as stack:
        sys.stdout.write(json.dumps(restarts(Place(stack, "llama", device), device)) + "\n")


if __name__ == "__main__":
    main()
