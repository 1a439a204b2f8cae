"""Unifies the memory that the ranks of a pool declare, in place of the planner.

1. Ranks declare the same, except for num_blocks, size_bytes, the layers of the groups and the entries of the
   fingerprint that describe a rank. An error names the first difference.
2. The pool gets the smallest number of blocks, and of blocks in host memory. Each rank keeps its size per block, in one
   buffer for all of its layers.
3. The pool gets the declared configuration. Its groups have the layers of all ranks, in rank order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpool.core.errors import WrongStateError
from kvpool.core.planning.grouping import field_value, layer_specs
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor, Plan, PlanOptions
from kvpool.core.planning.planner import finished_plan
from kvpool.core.ranks.messages import DeclaredMemory, Registration
from kvpool.core.specs.base import QUOTED_CHARACTERS, KVCacheSpec
from kvpool.core.specs.kinds import UniformTypeKVCacheSpecs, differing_field
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two declarations.

    Attributes:
        field: The field in DeclaredMemory.
        mine: What one declares, for display.
        theirs: What the other declares.
    """

    field: str
    mine: str
    theirs: str


def check_declared_alike(registration: Registration, other: Registration) -> None:
    """Checks that a rank declares what another rank does, or that neither declares its memory.

    Raises:
        WrongStateError: The ranks disagree; names the field.
    """
    mine, theirs = registration.declared, other.declared
    if mine is None and theirs is None:
        return
    found = (
        Difference("", _presence(mine), _presence(theirs)) if not (mine and theirs) else _rank_difference(mine, theirs)
    )
    if found:
        field = f"register.declared.{found.field}".removesuffix(".")
        raise WrongStateError("RANKS_DISAGREE", f"{found.mine}, rank {other.rank} has {found.theirs}", field=field)


def declared_difference(mine: DeclaredMemory, theirs: DeclaredMemory) -> Difference | None:
    """Returns the first difference between what two engines declare for one rank; None if they declare the same."""
    found = _rank_difference(mine, theirs) or _fingerprint_difference(dict(mine.fingerprint), dict(theirs.fingerprint))
    if found:
        return found
    for i, (group, known) in enumerate(zip(mine.config.groups, theirs.config.groups, strict=True)):
        if group.layer_names != known.layer_names:
            return Difference(f"config.groups[{i}].layer_names", "these layers", "others")
    if mine.config.num_blocks != theirs.config.num_blocks:
        return Difference("config.num_blocks", str(mine.config.num_blocks), str(theirs.config.num_blocks))
    if mine != theirs:
        return Difference("size_bytes", str(mine.size_bytes), str(theirs.size_bytes))
    return None


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


def declared_pool_config(declared: DeclaredMemory, plan: Plan, num_host_blocks: int) -> PoolConfig:
    """Returns the configuration of the pool of a plan, of which one rank declared this."""
    return replace(declared.config, num_blocks=plan.num_blocks, groups=plan.groups, num_host_blocks=num_host_blocks)


def _rank_config(declared: DeclaredMemory, num_blocks: int) -> KVCacheConfig:
    buffer = KVCacheTensor(declared.block_bytes * num_blocks, tuple(declared.layers))
    return KVCacheConfig(num_blocks, (buffer,), declared.config.groups)


def _merged(groups: Sequence[KVCacheGroup]) -> KVCacheGroup:
    """Returns a group of the pool from the same group of each rank."""
    specs = dict(layer for group in groups for layer in layer_specs(group))
    spec = groups[0].spec
    if isinstance(spec, UniformTypeKVCacheSpecs) and specs:
        spec = replace(spec, layers=tuple(specs.items()))
    return replace(groups[0], spec=spec, layer_names=tuple(specs))


def _without_groups(config: PoolConfig) -> PoolConfig:
    return replace(config, num_blocks=0, groups=())


def _rank_difference(mine: DeclaredMemory, theirs: DeclaredMemory) -> Difference | None:
    """Returns the first difference in what must be equal in all ranks."""
    found = _group_difference(mine.config.groups, theirs.config.groups)
    if found:
        return found
    left, right = _without_groups(mine.config), _without_groups(theirs.config)
    field = right.difference(left)
    if field:
        return Difference(f"config.{field}", _shown(left, field), _shown(right, field))
    return _fingerprint_difference(mine.common_fingerprint, theirs.common_fingerprint)


def _group_difference(mine: Sequence[KVCacheGroup], theirs: Sequence[KVCacheGroup]) -> Difference | None:
    if len(mine) != len(theirs):
        return Difference("config.groups", f"{len(mine)} groups", str(len(theirs)))
    for i, (group, known) in enumerate(zip(mine, theirs, strict=True)):
        found = _spec_difference(group.spec, known.spec)
        if found:
            return replace(found, field=f"config.groups[{i}].spec.{found.field}")
        if group.has_no_draft != known.has_no_draft:
            return Difference(f"config.groups[{i}].has_no_draft", str(group.has_no_draft), str(known.has_no_draft))
    return None


def _spec_difference(spec: KVCacheSpec, known: KVCacheSpec) -> Difference | None:
    """Returns the first field in which the specs of a group differ.

    Groups of uniform type may have different layers, but all of them allocate alike.
    """
    prefix = ""
    if isinstance(spec, UniformTypeKVCacheSpecs) and isinstance(known, UniformTypeKVCacheSpecs):
        spec, known, prefix = spec.first, known.first, "layers[0]."
        if spec.allocates_like(known):
            return None
    field = differing_field(spec, known)
    if not field:
        return None
    return Difference(prefix + field, str(field_value(spec, field)), str(field_value(known, field)))


def _fingerprint_difference(mine: dict[str, str], theirs: dict[str, str]) -> Difference | None:
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            return Difference(f'fingerprint["{name}"]', _quoted(mine.get(name)), _quoted(theirs.get(name)))
    return None


def _shown(config: PoolConfig, field: str) -> str:
    """The value of a field; hash schemes contain a secret."""
    return "a value" if field.startswith("hash_scheme.") else str(getattr(config, field))


def _presence(declared: DeclaredMemory | None) -> str:
    return "set" if declared else "absent"


def _quoted(value: str | None) -> str:
    return "absent" if value is None else repr(value[:QUOTED_CHARACTERS])
