"""The profile `cluster`: a standby continues the sessions of a killed primary."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.compose import PROJECT, SCHEDULERS, Inject, Stack, docker, eventually

pytestmark = pytest.mark.complete

SERVERS = ("kv-a", "kv-b")
ADDRESSES = ",".join(f"{server}:50051" for server in SERVERS)
ETCD = ("etcd-0", "etcd-1", "etcd-2")
STEPPER = Path(__file__).with_name("stepper.py")


@pytest.fixture
def cluster(stack: Stack) -> Iterator[Stack]:
    """The stack whose ranks and schedulers use the shard; afterwards they use the service `server` again."""
    with stack.settings(COMPOSE_PROFILES="cluster", KVPOOL_SERVERS=ADDRESSES):
        try:
            stack.compose("build", ETCD[0])
            stack.compose("up", "-d", "--no-build")
            yield stack
        finally:
            print(stack.logs(*SERVERS))  # noqa: T201 - pytest shows it if the test failed
            stack.compose("rm", "--stop", "--force", *SERVERS, *ETCD)
    stack.compose("up", "-d", "--no-build")
    stack.wait_at_work()
    left = '{__name__=~"kvpool_.+",instance=~"kv-.*"}'
    eventually("the figures of the shard to end", lambda: not stack.prometheus.query(left), 120)


@pytest.fixture
def stepper(cluster: Stack) -> Iterator["subprocess.Popen[str]"]:
    """A scheduler in a container that steps until its input ends."""
    command = ["docker", "run", "--rm", "-i", "--network", f"{PROJECT}_default", "-v", f"{STEPPER}:/stepper.py:ro"]
    command += ["--entrypoint", "python", "kvpool-server", "/stepper.py", ADDRESSES]
    in_shard(cluster, 'sum by (pool) (kvpool_sessions{instance=~"kv-.*"})', len(SCHEDULERS))  # not those of `server`
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def in_shard(stack: Stack, expression: str, value: float) -> None:
    """Waits until Prometheus has a value."""
    eventually(f"{expression} = {value}", lambda: stack.prometheus.value(expression) == value)


def test_a_session_goes_on_when_the_primary_is_killed(
    cluster: Stack, stepper: "subprocess.Popen[str]", inject: Inject
) -> None:
    assert stepper.stdout
    assert stepper.stdin
    first = json.loads(stepper.stdout.readline())
    in_shard(cluster, "min(kvpool_shard_in_sync_servers)", 2)
    # After a takeover Prometheus may know two primaries, until it has scraped both servers.
    primaries = 'kvpool_shard_role{role="primary"} == 1'
    found = eventually("one primary", lambda: found if len(found := cluster.prometheus.query(primaries)) == 1 else None)
    primary = found[0].labels["instance"].removesuffix(":9464")
    (standby,) = set(SERVERS) - {primary}

    opened = [cluster.logs(scheduler).count("a session on pool") for scheduler in SCHEDULERS]
    failure = inject("primary of a shard killed, started again")
    docker("kill", cluster.container(primary))
    in_shard(cluster, f'kvpool_shard_role{{role="primary",instance="{standby}:9464"}}', 1)
    in_shard(cluster, f'kvpool_shard_takeovers_total{{instance="{standby}:9464"}}', 1)
    in_shard(cluster, f'kvpool_shard_in_sync_servers{{instance="{standby}:9464"}}', 1)
    failure.noticed()
    stepper.stdin.close()
    last = json.loads(stepper.stdout.readline())
    assert (last["session"], last["epoch"]) == (first["session"], first["epoch"])
    assert last["blocks"] == first["blocks"]
    assert stepper.wait(60) == 0
    assert [cluster.logs(scheduler).count("a session on pool") for scheduler in SCHEDULERS] == opened

    failure.repaired()
    cluster.compose("start", primary)
    in_shard(cluster, "min(kvpool_shard_in_sync_servers)", 2)
    in_shard(cluster, f'kvpool_shard_role{{role="standby",instance="{primary}:9464"}}', 1)
    failure.recovered(f"nothing: the longest of {last['steps']} steps took {last['longest_seconds'] * 1000:.0f} ms")
