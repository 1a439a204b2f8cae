"""Which primaries to move so that the hosts of a cluster have equal loads."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpool.client.admin import Shard
from kvpool.wire.address import host_and_port


@dataclass(frozen=True, slots=True)
class Move:
    """A hand-over that makes another standby the primary.

    Attributes:
        shard: The shard.
        to: Address of the standby.
    """

    shard: Shard
    to: str


def moves_to_balance(shards: Sequence[Shard]) -> list[Move]:
    """Returns the hand-overs that make the loads of the hosts as equal as the standbys allow, at most one per shard.

    The load of a host is the sum of the weights of the shards whose primary it runs: 1 + the number of pools. Each step
    of the search reduces the sum of the squared loads, by as much as one step can, so it ends.
    """
    before = {shard.name: shard for shard in shards if shard.primary}
    at = dict(before)
    loads: Counter[str] = Counter()
    for shard in at.values():
        loads[_host(shard.primary)] += _weight(shard)
    while True:
        candidates = [
            (_gain(loads, shard, standby), shard.name, standby) for shard in at.values() for standby in shard.standbys
        ]
        gain, name, standby = max(candidates, default=(0, "", ()))
        if gain <= 0:
            break
        shard = at[name]
        loads[_host(shard.primary)] -= _weight(shard)
        loads[_host(standby)] += _weight(shard)
        others = tuple(each for each in shard.standbys if each != standby)
        at[name] = replace(shard, primary=standby, standbys=(shard.primary, *others))
    return [Move(shard, at[name].primary[0]) for name, shard in before.items() if at[name].primary != shard.primary]


def _gain(loads: Counter[str], shard: Shard, standby: tuple[str, ...]) -> int:
    """How much the sum of the squared loads falls, divided by twice the weight."""
    source, target = _host(shard.primary), _host(standby)
    return 0 if source == target else loads[source] - loads[target] - _weight(shard)


def _weight(shard: Shard) -> int:
    return 1 + shard.num_pools


def _host(addresses: tuple[str, ...]) -> str:
    return host_and_port("address", addresses[0])[0]
