"""Processes of all kinds are killed and stopped at random: no change is lost, and no block has two owners."""

import secrets
from pathlib import Path
from typing import Any, Final

import pytest

from crash.run import killing, run, table
from crash.site import Plan
from support.etcd import needs_etcd
from support.hosts import needs_hosts

_SERVER: Final = {"lends": True}
_CLUSTER: Final = {"journaled": True, "is_cluster": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kills", "plan"),
    [
        ("--lend --journal", 12, {**_SERVER, "journaled": True}),
        pytest.param("--lend", 25, _SERVER, marks=pytest.mark.complete),
        pytest.param("--lend --journal", 25, {**_SERVER, "journaled": True}, marks=pytest.mark.complete),
        pytest.param("--cluster", 8, _CLUSTER, marks=needs_etcd),
        pytest.param("--cluster", 25, _CLUSTER, marks=[needs_etcd, pytest.mark.complete]),
        pytest.param(
            "--cluster --hosts",
            12,
            {**_CLUSTER, "has_hosts": True},
            marks=[needs_etcd, needs_hosts, pytest.mark.complete],
        ),
    ],
)
def test_killed_processes_cause_no_violations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, kills: int, plan: dict[str, Any]
) -> None:
    """Without a journal, forgotten sessions end with a clear error; with a journal, or in a shard, they continue."""
    seed = secrets.randbelow(10**6)
    verdict = run(tmp_path, Plan(seed, **plan), killing(kills))
    with capsys.disabled():
        print(f"\nseed {seed}\n{table(verdict)}")  # noqa: T201
    assert not verdict.violations, f"tests/crash/run.py {options} --kills {kills} --seed {seed}"
    assert verdict.blocks["hit"], "prefixes were shared"
