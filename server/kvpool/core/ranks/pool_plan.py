"""The plan of a pool of ranks and its configuration: from the planner, or as the ranks declare their memory."""

from collections.abc import Sequence
from dataclasses import replace

from kvpool.core.ids import PoolName
from kvpool.core.planning.plan import Plan, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.ranks.declared import declared_plan, declared_pool_config
from kvpool.core.ranks.messages import Registration
from kvpool.core.specs.pool_config import PoolConfig


def make_plan(ranks: Sequence[Registration], num_blocks: int = 0) -> Plan:
    """Makes the plan of all ranks.

    Args:
        ranks: All ranks of the pool, in rank order. They agree.
        num_blocks: Number of blocks; 0 for as many as the ranks allow.

    Raises:
        PlanError: See `get_kv_cache_configs`.
        InvalidArgumentError: As PlanError.
    """
    declarations = [rank.declared for rank in ranks if rank.declared]
    if declarations:
        return declared_plan(declarations, num_blocks)
    options = ranks[0].options
    memory = [RankMemory(rank.layers, rank.available_bytes) for rank in ranks]
    return get_kv_cache_configs(memory, replace(options, num_blocks_override=num_blocks) if num_blocks else options)


def pool_config(name: PoolName, ranks: Sequence[Registration], plan: Plan) -> PoolConfig:
    """Returns the configuration of the pool that a plan of these ranks describes."""
    first = ranks[0]
    if first.declared is None:
        return first.options.pool_config(name, plan)
    return declared_pool_config(first.declared, plan, num_host_blocks(ranks))


def num_host_blocks(ranks: Sequence[Registration]) -> int:
    """Returns the number of blocks in host memory that a pool of these ranks has."""
    return min(rank.num_host_blocks for rank in ranks)


def num_blocks_field(ranks: Sequence[Registration]) -> str:
    """Returns the name of the field with which these ranks limit the number of blocks, for errors."""
    return "register.declared.config.num_blocks" if ranks[0].declared else "options.num_blocks_override"
