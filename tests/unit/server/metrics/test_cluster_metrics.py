"""The exported metrics of a server of a shard."""

from dataclasses import replace

from kvpool.server.cluster.facts import Role
from kvpool.server.metrics.cluster_metrics import ROLES, ShardSample, cluster_metrics
from support.shard_figures import shard_sample


def values(sample: ShardSample) -> dict[tuple[str, ...], float]:
    """Samples by name and by the values of labels beside the shard."""
    found: dict[tuple[str, ...], float] = {}
    for metric in cluster_metrics(sample):
        for each in metric.samples:
            labels = dict(each.labels)
            assert labels.pop("shard") == "prod/llama"
            found[each.name, *labels.values()] = each.value
    return found


def test_every_sample_has_its_figure() -> None:
    exported = values(shard_sample())
    assert {name: value for (name, *labels), value in exported.items() if not labels} == {
        "kvpool_shard_term": 7,
        "kvpool_shard_in_sync_servers": 2,
        "kvpool_shard_alone": 0,
        "kvpool_shard_standbys_missing": 1,
        "kvpool_shard_takeovers_total": 1,
        "kvpool_shard_standbys_connected": 1,
        "kvpool_shard_lag_positions": 3,
        "kvpool_shard_lag_seconds": 0.2,
        "kvpool_shard_records_total": 11,
        "kvpool_shard_sent_bytes_total": 1300,
        "kvpool_shard_directory_up": 1,
        "kvpool_shard_confirm_seconds_count": 1,
        "kvpool_shard_confirm_seconds_sum": 0.5,
    }
    assert [exported["kvpool_shard_confirm_seconds_bucket", bound] for bound in ("0.001", "1.0", "+Inf")] == [0, 1, 1]
    assert exported["kvpool_shard_state_lost_total", "no_state"] == 1
    assert exported["kvpool_shard_state_lost_total", "difference"] == 0


def test_one_role_is_one_and_the_others_are_zero() -> None:
    for role in ROLES:
        exported = values(replace(shard_sample(), role=role))
        assert [exported["kvpool_shard_role", each] for each in ROLES] == [each == role for each in ROLES]


def test_the_roles_are_those_of_a_replica() -> None:
    assert tuple(role.value for role in Role) == ROLES
