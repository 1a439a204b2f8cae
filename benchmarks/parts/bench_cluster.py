"""Measures what a standby costs: decode steps of 256 requests, in turns on three kinds of servers. Prints one JSON.

`journal`: a server with a journal. `alone`: the primary of a shard without a standby. `pair`: the primary of a shard
with one. Processor time is that of the server's process per step, and of the standby's per record. All processes
share the cores of this machine: with two cores, the standby and the client take time from the primary, so the latency
of `pair` is an upper limit. Needs etcd. Machines are noisy: compare within one run only.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from benchmarks.machine import processor_us
from benchmarks.parts.bench_metrics import Decodes
from kvpool.client import connect
from kvpool.v1 import directory_pb2, directory_pb2_grpc
from support.etcd import EtcdCluster
from support.server import free_port

WAIT_SECONDS = 60.0


class Process:
    """A `kvpool serve`.

    Attributes:
        address: Its address.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        program = Path(sys.executable).with_name("kvpool")
        command = [str(program), "serve", "--listen", self.address, "--journal", str(folder)]
        self._process = subprocess.Popen([*command, "--log-level", "error", *options])

    @property
    def processor_seconds(self) -> float:
        """Processor time that it has used."""
        return (processor_us(self._process.pid) or 0.0) / 1e6

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


def member(folder: Path, etcd: EtcdCluster, shard: str, *options: str) -> Process:
    """Starts a server of a shard."""
    # A cluster each: in one, the second client would be sent to the shard that has the pool.
    cluster = ["--cluster", f"etcd://{','.join(etcd.endpoints)}/{shard}"]
    return Process(folder, *cluster, "--replication-listen", f"127.0.0.1:{free_port()}", *options)


def cost_of_a_step(rounds: int) -> dict[str, dict[str, float]]:
    """Measures decode steps on each kind of server, in turns."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        etcd = EtcdCluster(folder / "etcd", 1)
        stack.callback(etcd.kill)
        kinds = {
            "journal": [Process(folder / "j")],
            "alone": [member(folder / "a", etcd, "alone")],
            "pair": [member(folder / "p", etcd, "pair")],
        }
        sides: dict[str, Decodes] = {}
        for name, processes in kinds.items():
            stack.callback(processes[0].kill)
            client = connect(processes[0].address, deadline_seconds=WAIT_SECONDS)
            sides[name] = Decodes(stack.enter_context(client), 100_000)
        kinds["pair"].append(member(folder / "s", etcd, "pair"))
        stack.callback(kinds["pair"][1].kill)
        wait_for_standby(kinds["pair"][0])
        return measure(kinds, sides, rounds)


def wait_for_standby(primary: Process) -> None:
    """Waits until a primary has a standby that is in sync."""
    with grpc.insecure_channel(primary.address) as channel:
        stub = directory_pb2_grpc.DirectoryServiceStub(channel)
        request = directory_pb2.DirectoryServiceWatchRequest()
        for message in stub.Watch(request, timeout=WAIT_SECONDS):
            if len(message.shard.members) > 1:
                return


def measure(kinds: dict[str, list[Process]], sides: dict[str, Decodes], rounds: int) -> dict[str, dict[str, float]]:
    """Runs the steps. The first process of each kind is the primary."""
    for _ in range(20):
        for side in sides.values():
            side.step()
    took: dict[str, list[float]] = {name: [] for name in sides}
    before = {name: [process.processor_seconds for process in processes] for name, processes in kinds.items()}
    names = list(sides)
    for i in range(rounds):
        for name in names[i % 3 :] + names[: i % 3]:
            took[name].append(sides[name].step())
    figures: dict[str, dict[str, float]] = {}
    for name, processes in kinds.items():
        steps = sorted(took[name])
        spent = [process.processor_seconds - start for process, start in zip(processes, before[name], strict=True)]
        figures[name] = {
            "mean_ms": statistics.fmean(steps),
            "p50_ms": statistics.median(steps),
            "p99_ms": steps[int(len(steps) * 0.99)],
            "mean_to_journal": statistics.fmean(steps) / statistics.fmean(took["journal"]),
            "server_processor_us": spent[0] / rounds * 1e6,
        }
        if spent[1:]:
            figures[name]["standby_processor_us"] = spent[1] / rounds * 1e6
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    figures = cost_of_a_step(parser.parse_args().rounds)
    rounded = {kind: {name: round(value, 3) for name, value in each.items()} for kind, each in figures.items()}
    print(json.dumps(rounded))  # noqa: T201 - the program's output


if __name__ == "__main__":
    main()
