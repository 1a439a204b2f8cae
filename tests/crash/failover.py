"""Measures how long a session waits for its next answer when the primary dies, stops, is cut off or hands over: --help.

One session with many running requests steps all the time. Before each strike the servers are in sync. A pause is the
longest time between two answers of the session, from the strike until the servers are in sync again or the time is up.
At last all nodes of etcd stop for a while, which nothing may notice.
"""

import argparse
import contextlib
import json
import math
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from kvpool.client import Client, FullAttentionSpec, KVCacheGroup, KvpoolError, PoolConfig, Request, Session, connect
from kvpool.core.ids import PoolName
from support.etcd import EtcdCluster, EtcdNode, etcd_cluster
from support.hosts import made_hosts
from support.pair import Pair, PairServer
from support.programs import exit_on_sigterm
from support.workers import ready, worker_processes

MAX_TOKENS: Final = 512
PROMPT_TOKENS: Final = 64
WATCHED_SECONDS: Final = 0.5
"""Time from a strike in which pauses count. A pause that begins in it counts as a whole."""
_DEADLINE_SECONDS: Final = 60.0


@dataclass(slots=True)
class Load:
    """One session whose requests all get a token in each step. Runs in a thread.

    Attributes:
        session: The session.
        count: Number of requests.
        failures: Errors of calls, as text.
    """

    session: Session
    count: int
    failures: list[str] = field(default_factory=list)
    _answered_seconds: list[float] = field(default_factory=list)
    _running: list[Request] = field(default_factory=list)
    _num_started: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Steps until `end`."""
        while not self._is_over.is_set():
            try:
                self._step()
            except KvpoolError as error:
                self.failures.append(f"{type(error).__name__} {error.reason}: {error}")
                with contextlib.suppress(KvpoolError):
                    self.session.settle()
                continue
            self._answered_seconds.append(time.monotonic())

    def end(self) -> None:
        """Ends `run`."""
        self._is_over.set()

    def longest_pause(self, start: float, end: float) -> float | None:
        """The longest time without an answer that begins before `end`; None if it is not over yet.

        A pause that began before `start` counts from there.
        """
        answers = self._answered_seconds[-100_000:]
        times = [start, *(at for at in answers if at > start)]
        if times[-1] <= end:
            return None
        return max(later - earlier for earlier, later in pairwise(times) if earlier <= end)

    def pauses(self, start: float, end: float) -> list[float]:
        """The times between answers in a period, sorted."""
        times = [at for at in self._answered_seconds if start < at < end]
        return sorted(later - earlier for earlier, later in pairwise(times))

    def _step(self) -> None:
        done = [each for each in self._running if each.num_tokens >= MAX_TOKENS]
        self._running = [each for each in self._running if each.num_tokens < MAX_TOKENS]
        for request in self._running:
            request.append([request.num_tokens])
        started = [self._new_request() for _ in range(self.count - len(self._running))]
        with self.session.step(executed_sequence=self.session.sequence) as step:
            for request in done:
                step.free(request)
            for request in self._running:
                step.allocate_slots(request, 1)
            for request in started:
                step.admit(request, PROMPT_TOKENS)
        self._running += started

    def _new_request(self) -> Request:
        self._num_started += 1
        return self.session.request(
            f"r{self._num_started}", [self._num_started] * (PROMPT_TOKENS + self._num_started % 99)
        )


def kill(server: PairServer) -> Callable[[], object]:
    """SIGKILL."""
    server.kill()
    return server.start


def stop(server: PairServer) -> Callable[[], object]:
    """SIGSTOP."""
    server.pause()
    return server.resume


def cut(server: PairServer) -> Callable[[], object]:
    """The standby hears nothing of the primary any more, but the primary hears it. Either may go on."""
    assert server.link
    server.link.cut_to_client()
    return server.link.heal


def cut_back(server: PairServer) -> Callable[[], object]:
    """The primary hears nothing of the standby any more, and goes on without it: no failover."""
    assert server.link
    server.link.cut_to_server()
    return server.link.heal


def isolate(server: PairServer) -> Callable[[], object]:
    """The host of the primary is off the network: clients, ranks, etcd and the standby lose all its packets."""
    server.host.isolate()
    return server.host.heal


def hand_over(server: PairServer) -> Callable[[], object]:
    """SIGTERM."""
    server.process.signal(signal.SIGTERM)

    def restart() -> None:
        server.process.end()
        server.start()

    return restart


STRIKES: Final = {each.__name__: each for each in (kill, stop, cut, cut_back, isolate, hand_over)}
_WITHOUT_HOSTS: Final = [kind for kind in STRIKES if kind != "isolate"]
_ON_HOSTS: Final = [kind for kind in STRIKES if not kind.startswith("cut")]


@contextlib.contextmanager
def the_session(client: Client, pair: Pair, folder: Path, num_ranks: int) -> Iterator[Session]:
    """Opens a session of a pool that ranks form, or without ranks of a declared one."""
    name = PoolName("m")
    with worker_processes(folder) as workers:
        ranks = [workers.start(pair.seeds, rank, num_ranks, blocks=4000) for rank in range(num_ranks)]
        for rank in ranks:
            rank.wait_for(ready(r"\d+"))
        if not ranks:
            groups = (KVCacheGroup(FullAttentionSpec(16), ("layer",)),)
            client.create_pool(PoolConfig(name, 10_000, MAX_TOKENS, groups))
        yield client.open_session(name, lease_seconds=300)


def measure(pair: Pair, load: Load, name: str, count: int) -> dict[str, object]:
    """Strikes the primary some times. Returns the figures."""
    pauses: list[float] = []
    failures_before = len(load.failures)
    changed = 0
    for i in range(count):
        term = pair.wait_in_sync()
        struck = time.monotonic()
        heal = STRIKES[name](pair.primary())
        while (pause := load.longest_pause(struck, struck + WATCHED_SECONDS)) is None:
            time.sleep(0.02)
            if time.monotonic() - struck > _DEADLINE_SECONDS:
                raise TimeoutError(f"no answer after {name}")
        heal()
        changed += pair.wait_in_sync() > term
        pauses.append(pause)
        print(f"\r{name} {i + 1} of {count}: {pause * 1e3:.0f} ms ", end="", file=sys.stderr, flush=True)  # noqa: T201
    ordered = sorted(pauses)
    return {
        "count": count,
        "failovers": changed,
        "p50_ms": round(statistics.median(ordered) * 1e3),
        "p99_ms": round(ordered[math.ceil(len(ordered) * 0.99) - 1] * 1e3),
        "max_ms": round(ordered[-1] * 1e3),
        "failed_calls": len(load.failures) - failures_before,
    }


def stop_etcd(pair: Pair, load: Load, etcd: EtcdCluster, seconds: float) -> dict[str, object]:
    """Stops all nodes of etcd. Returns the figures of as long before, and of this time."""
    term, failures_before = pair.wait_in_sync(), len(load.failures)
    times = [time.monotonic()]
    for act in (lambda _: None, EtcdNode.pause):
        for node in etcd.nodes:
            act(node)
        time.sleep(seconds)
        times.append(time.monotonic())
    for node in etcd.nodes:
        node.resume()
    figures: dict[str, object] = {"seconds": seconds}
    for name, start, end in zip(("before", "stopped"), times, times[1:], strict=False):
        pauses = load.pauses(start, end)
        figures |= {
            f"{name}_steps": len(pauses) + 1,
            f"{name}_p50_ms": round(statistics.median(pauses) * 1e3, 2),
            f"{name}_p99_ms": round(pauses[math.ceil(len(pauses) * 0.99) - 1] * 1e3, 2),
            f"{name}_max_ms": round(pauses[-1] * 1e3),
        }
    failovers = pair.wait_in_sync() - term
    return {**figures, "failovers": failovers, "failed_calls": len(load.failures) - failures_before}


def main() -> int:
    """Runs from the command line; exits with 1 if calls failed."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="strikes of each kind")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--ranks", type=int, choices=[0, 2], default=0)
    parser.add_argument("--etcd", type=int, choices=[1, 3], default=3, help="nodes of etcd")
    parser.add_argument("--etcd-stopped-seconds", type=float, default=60.0, help="0: not at all")
    parser.add_argument("--hosts", action="store_true", help="each server on a host of its own; needs root")
    parser.add_argument("--kinds", nargs="*", choices=STRIKES, help="cut needs no hosts, and isolate needs them")
    options = parser.parse_args()
    kinds = options.kinds or (_ON_HOSTS if options.hosts else _WITHOUT_HOSTS)
    figures: dict[str, dict[str, object]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        made_hosts(2 if options.hosts else 0) as (hosts, addresses),
        etcd_cluster(options.etcd, addresses=addresses[: options.etcd]) as etcd,
    ):
        url = f"etcd://{','.join(etcd.endpoints)}/failover"
        pair = Pair(Path(folder), url, is_cuttable=not hosts, hosts=hosts)
        with contextlib.closing(pair):
            pair.start()
            with (
                connect(pair.seeds, deadline_seconds=_DEADLINE_SECONDS) as client,
                the_session(client, pair, Path(folder), options.ranks) as session,
            ):
                load = Load(session, options.requests)
                thread = threading.Thread(target=load.run, daemon=True)
                thread.start()
                for name in kinds:
                    figures[name] = measure(pair, load, name, options.count)
                without_etcd = {}
                if options.etcd_stopped_seconds:
                    without_etcd = stop_etcd(pair, load, etcd, options.etcd_stopped_seconds)
                load.end()
                thread.join()
    columns = list(next(iter(figures.values()), ()))
    print(f"\n| strike | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")  # noqa: T201
    for name, row in figures.items():
        print(f"| {name} | {' | '.join(str(value) for value in row.values())} |")  # noqa: T201
    everything = {**vars(options), "figures": figures, "etcd_stopped": without_etcd, "failures": load.failures[:20]}
    print(json.dumps(everything))  # noqa: T201 - the program's output
    return 1 if load.failures else 0


if __name__ == "__main__":
    sys.exit(main())
