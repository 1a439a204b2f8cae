"""The exported metrics of a server of a shard."""

from dataclasses import replace

from kvpool.server.cluster.facts import Role
from kvpool.server.metrics.cluster_metrics import ROLES, ShardSample, cluster_metrics
from support.shard_figures import shard_sample


def roles(sample: ShardSample) -> list[float]:
    """Samples of the roles, in their order."""
    (metric,) = [each for each in cluster_metrics(sample) if each.name == "kvpool_shard_role"]
    found = {each.labels["role"]: each.value for each in metric.samples}
    return [found[role] for role in ROLES]


def test_one_role_is_one_and_the_others_are_zero() -> None:
    for role in ROLES:
        assert roles(replace(shard_sample(), role=role)) == [each == role for each in ROLES]


def test_the_roles_are_those_of_a_replica() -> None:
    assert tuple(role.value for role in Role) == ROLES
