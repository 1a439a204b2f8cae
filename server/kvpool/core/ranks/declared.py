"""Unifies the memory that the ranks of a pool declare, in place of the planner.

1. Ranks declare the same, except for num_blocks, size_bytes and the layers of the groups. An error names the first
   difference.
2. The pool gets the smallest number of blocks. Each rank keeps its size per block, in one buffer for all of its layers.
3. The pool gets the declared configuration. Its groups have the layers of all ranks, in rank order.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvpool.core.errors import WrongStateError
from kvpool.core.planning.grouping import field_value, layer_specs
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor, Plan, PlanOptions
from kvpool.core.planning.planner import finished_plan
from kvpool.core.ranks.messages import DeclaredMemory, Registration
from kvpool.core.specs.base import QUOTED_CHARACTERS, KVCacheSpec
from kvpool.core.specs.kinds import UniformTypeKVCacheSpecs, differing_field
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig


def check_declared_alike(registration: Registration, other: Registration) -> None:
    """Checks that a rank declares what another rank does, or that neither declares its memory.

    Raises:
        WrongStateError: The ranks disagree; names the field.
    """
    mine, theirs = registration.declared, other.declared
    if mine is None and theirs is None:
        return
    if mine is None or theirs is None:
        message = f"is {'set' if mine else 'absent'}, and {'set' if theirs else 'absent'} in rank {other.rank}"
        raise _disagreement("", message)
    _check_groups(mine.config.groups, theirs.config.groups, other)
    field = _without_groups(theirs.config).difference(_without_groups(mine.config))
    if field:
        raise _disagreement(f".config.{field}", f"differs from that of rank {other.rank}")
    _check_fingerprints(dict(mine.fingerprint), dict(theirs.fingerprint), other)


def declared_plan(declarations: Sequence[DeclaredMemory], num_blocks: int = 0) -> Plan:
    """Returns the plan that gives each rank what it declared.

    Args:
        declarations: What the ranks declared, in rank order. They agree.
        num_blocks: Number of blocks of the pool; 0 for the smallest number that a rank declared.
    """
    num_blocks = num_blocks or min(declared.config.num_blocks for declared in declarations)
    config = declarations[0].config
    options = PlanOptions(config.max_model_len, decode_context_parallel_size=config.dcp_world_size)
    configs = tuple(_rank_config(declared, num_blocks) for declared in declarations)
    groups = tuple(map(_merged, zip(*(declared.config.groups for declared in declarations), strict=True)))
    return finished_plan(configs, groups, config.max_model_len, options)


def declared_pool_config(declared: DeclaredMemory, plan: Plan) -> PoolConfig:
    """Returns the configuration of the pool of a plan, of which one rank declared this."""
    return replace(declared.config, num_blocks=plan.num_blocks, groups=plan.groups)


def _rank_config(declared: DeclaredMemory, num_blocks: int) -> KVCacheConfig:
    size_bytes = declared.size_bytes // declared.config.num_blocks * num_blocks
    buffer = KVCacheTensor(size_bytes, tuple(declared.layers))
    return KVCacheConfig(num_blocks, (buffer,), declared.config.groups)


def _merged(groups: Sequence[KVCacheGroup]) -> KVCacheGroup:
    """Returns a group of the pool from the same group of each rank."""
    specs = dict(layer for group in groups for layer in layer_specs(group))
    spec = groups[0].spec
    if isinstance(spec, UniformTypeKVCacheSpecs) and specs:
        spec = replace(spec, layers=tuple(specs.items()))
    return KVCacheGroup(spec, tuple(specs))


def _without_groups(config: PoolConfig) -> PoolConfig:
    return replace(config, num_blocks=0, groups=())


def _check_groups(mine: Sequence[KVCacheGroup], theirs: Sequence[KVCacheGroup], other: Registration) -> None:
    if len(mine) != len(theirs):
        raise _disagreement(".config.groups", f"{len(mine)} groups, rank {other.rank} has {len(theirs)}")
    for i, (group, known) in enumerate(zip(mine, theirs, strict=True)):
        field, left, right = _spec_difference(group.spec, known.spec)
        if field:
            message = f"{left}, rank {other.rank} has {right}"
            raise _disagreement(f".config.groups[{i}].spec.{field}", message)


def _spec_difference(spec: KVCacheSpec, known: KVCacheSpec) -> tuple[str, object, object]:
    """Returns the first field in which the specs of a group differ, and its values; an empty name if none does.

    Groups of uniform type may have different layers, but all of them allocate alike.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs) and isinstance(known, UniformTypeKVCacheSpecs):
        if spec.first.allocates_like(known.first):
            return "", None, None
        field = differing_field(spec.first, known.first)
        return f"layers[0].{field}", field_value(spec.first, field), field_value(known.first, field)
    field = differing_field(spec, known)
    return (field, field_value(spec, field), field_value(known, field)) if field else ("", None, None)


def _check_fingerprints(mine: dict[str, str], theirs: dict[str, str], other: Registration) -> None:
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            message = f"{_quoted(mine.get(name))}, rank {other.rank} has {_quoted(theirs.get(name))}"
            raise _disagreement(f'.fingerprint["{name}"]', message)


def _quoted(value: str | None) -> str:
    return "absent" if value is None else repr(value[:QUOTED_CHARACTERS])


def _disagreement(field: str, message: str) -> WrongStateError:
    return WrongStateError("RANKS_DISAGREE", message, field=f"register.declared{field}")
