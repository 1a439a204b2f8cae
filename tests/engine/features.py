"""What engines can be configured with, and how to see whether the installed vLLM is served it or refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as PlainAsync
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Setup, make_scheduler
from engine.schedules import KINDS, run, setup_of
from kvpool.client.vllm import Scheduler
from kvpool.client.vllm.lendable import check_version
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config

_SEEDS: Final = range(2)
_NOT_KNOWN: Final = "-"


class Feature(Protocol):
    """A feature of vLLM."""

    def seen(self, address: str, folder: Path) -> str:
        """What becomes of it in the installed version, as the page says it."""


def _refused(error: UnsupportedError, message: str) -> str:
    """Says that a feature is refused, with the remedy; the error must name the feature."""
    _, named, remedy = str(error).partition(message)
    assert named, error
    _, _, remedy = remedy.partition(": ")
    return f"refused: {remedy}" if remedy else "refused"


@dataclass(frozen=True)
class Schedules:
    """A feature of the scheduler.

    Attributes:
        kind: Of the schedules that are compared with vLLM's.
        is_known: Whether this version has it.
        message: Names the feature, where it is refused.
    """

    kind: Mapping[str, Any]
    is_known: bool = True
    message: str = ""

    def seen(self, address: str, folder: Path) -> str:
        """Compares a few schedules step by step."""
        if not self.is_known:
            return _NOT_KNOWN
        for seed in _SEEDS:
            setup = setup_of(self.kind, seed)
            kvpool = {"address": address, "pool": f"{'.'.join(self.kind)}.feature.{folder.name}.{seed}"}
            try:
                served = run(Scheduler, replace(setup, additional_config={"kvpool": kvpool}), seed, folder)
            except UnsupportedError as error:
                return _refused(error, self.message)
            assert served == run(PlainAsync if setup.is_async else Plain, setup, seed, folder), f"seed {seed}"
        return "served"


@dataclass(frozen=True)
class Setting:
    """A feature that an engine may not have, or not in every version.

    Attributes:
        path: The attribute of the scheduler that shows it, without which a version does not know the feature.
        value: Its value, or a function that makes it from the scheduler.
        message: Names the feature, where it is refused.
        setup: What else the scheduler is made with.
    """

    path: str
    value: Any
    message: str
    setup: Mapping[str, Any] = field(default_factory=dict)

    def seen(self, address: str, folder: Path) -> str:
        """Has the engine's pool configured, without the feature and with it."""
        del address
        scheduler = make_scheduler(Plain, Setup(**self.setup), folder)
        assert pool_config(scheduler, "p").num_blocks
        value = self.value(scheduler) if callable(self.value) else self.value
        if not set_attribute(scheduler, self.path, value):
            return _NOT_KNOWN
        try:
            pool_config(scheduler, "p")
        except UnsupportedError as error:
            return _refused(error, self.message)
        return "accepted"


def set_attribute(scheduler: Any, path: str, value: Any) -> bool:
    """Sets an attribute, also where it cannot be set as usual; returns whether this version has it."""
    *parents, name = path.split(".")
    target = scheduler
    for parent in parents:
        target = getattr(target, parent, None)
    if not hasattr(target, name):
        return False
    if isinstance(getattr(type(target), name, None), property):
        target.__class__ = type("Set", (type(target),), {name: value})
    else:
        object.__setattr__(target, name, value)
    return True


class _LentMemory:
    """Memory of a `kvpool worker`."""

    @staticmethod
    def seen(address: str, folder: Path) -> str:
        """Asks what the plugin asks."""
        del address, folder
        try:
            check_version()
        except UnsupportedError as error:
            return _refused(error, "lent memory")
        return "accepted"


class Connector:
    """A KV connector that uses no block pool."""

    bind_kv_cache_manager = KVConnectorBase_V1.bind_kv_cache_manager
    bind_gpu_block_pool = KVConnectorBase_V1.bind_gpu_block_pool


class BindingConnector(Connector):
    """A KV connector that works on vLLM's block pool."""

    def bind_gpu_block_pool(self, gpu_block_pool: object) -> None:
        """Keeps it."""


def _full(scheduler: Any) -> Any:
    return scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec


def make_groups(*specs: Any) -> list[Any]:
    """A group of one layer for each spec."""
    return [kv_cache_interface.KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]


def _with_states(scheduler: Any, **values: Any) -> list[Any]:
    full = _full(scheduler)
    state = {"block_size": 16, "shapes": ((4,),), "dtypes": (full.dtype,), **values}
    return make_groups(full, kv_cache_interface.MambaSpec(**state))


def _with_chunks(scheduler: Any) -> list[Any]:
    full = _full(scheduler)
    shape = {"num_kv_heads": 2, "head_size": 64, "dtype": full.dtype}
    return make_groups(
        full, kv_cache_interface.ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=64, **shape)
    )


_GROUPS: Final = "kv_cache_config.kv_cache_groups"
_EAGLE: Final = {"num_drafts": 3, "uses_eagle": True}
FEATURES: Final[Mapping[str, Feature]] = {
    "requests in their order of arrival": Schedules(KINDS["first_come"]),
    "priorities": Schedules(KINDS["priority"]),
    "async scheduling": Schedules(KINDS["a_step_ahead"]),
    "`prefill_schedule_interval`": Schedules(KINDS["prefill_every_fourth_step"]),
    "prefix caching turned off": Schedules(KINDS["without_caching"]),
    "sliding windows, all of their blocks cached": Schedules(KINDS["windows"]),
    "sliding windows, cached where hits are likely": Schedules(KINDS["sparse_windows"]),
    "groups with blocks of different sizes": Schedules(KINDS["sizes"]),
    "n-gram drafts": Schedules(KINDS["drafts"]),
    "EAGLE, MTP: the last block of a hit computed again": Schedules(KINDS["drafts_with_eagle"]),
    "EAGLE, MTP: hashes of blocks cover the next token": Schedules(
        KINDS["drafts_with_hashes_ahead"], hasattr(VllmConfig, "num_hash_lookahead_tokens")
    ),
    "EAGLE, MTP: sliding windows, cached where hits are likely": Schedules(KINDS["sparse_windows_with_eagle"]),
    "EAGLE, MTP: layers of the draft model in some groups only": Schedules(KINDS["eagle_beside_windows"]),
    "EAGLE, MTP: blocks of different sizes": Schedules(
        {**_EAGLE, **KINDS["sizes"]}, message="EAGLE with prefix caching and blocks of different sizes"
    ),
    "multi-module MTP": Schedules(KINDS["several_modules"]),
    "images": Schedules(KINDS["images"]),
    "KV connectors": Schedules(KINDS["connector"]),
    "KV connectors with async scheduling": Schedules(KINDS["connector_a_step_ahead"]),
    "KV connectors on vLLM's own block pool": Setting(
        "connector", BindingConnector(), "BindingConnector, which uses vLLM's own block pool"
    ),
    "KV connectors on vLLM's own block pool, among others": Setting(
        "connector",
        SimpleNamespace(_connectors=[Connector(), BindingConnector()]),
        "BindingConnector, which uses vLLM's own block pool",
    ),
    "KV connectors with sliding windows": Setting(
        "connector", Connector(), "groups other than one of full attention", {"windows": (0, 40)}
    ),
    "states of Mamba and of linear attention": Schedules(KINDS["states"]),
    "states that kernels write within a step": Schedules(KINDS["exported_states"]),
    "EAGLE, MTP: states": Schedules(KINDS["states_with_eagle"]),
    "EAGLE, MTP: states that kernels write within a step": Schedules(
        {**KINDS["states_with_eagle"], "exports_states": True},
        message="EAGLE with prefix caching of Mamba states that kernels write within a step",
    ),
    "states beside blocks of other sizes": Schedules(KINDS["larger_states"]),
    "states beside larger blocks of a window": Schedules(KINDS["states_with_a_larger_window"]),
    "states beside larger blocks of a window, all cached": Schedules(
        {**KINDS["states_with_a_larger_window"], "retention_tokens": None},
        message="all states beside blocks of other sizes that end no hits",
    ),
    "states with another `mamba_cache_mode` than align": Setting(_GROUPS, _with_states, "mamba_cache_mode='none'"),
    "chunked attention with blocks of another size": Setting(
        _GROUPS, _with_chunks, "chunks beside blocks of other sizes"
    ),
    "bounded replay of sliding windows": Schedules(KINDS["replayed_windows"]),
    "`prefix_match_unit` of its own": Schedules(KINDS["match_unit"]),
    "`prefix_match_unit` of its own, without states": Schedules(KINDS["match_unit_without_states"]),
    "EAGLE, MTP: `prefix_match_unit` of its own, with states": Schedules(KINDS["match_unit_with_eagle"]),
    "`enable_mamba_shared_prefix_checkpoint`": Setting(
        "vllm_config.cache_config.enable_mamba_shared_prefix_checkpoint",
        value=True,
        message="enable_mamba_shared_prefix_checkpoint",
    ),
    "`enable_return_routed_experts`": Setting(
        "vllm_config.aux_output_config.enable_return_routed_experts", value=True, message="returned routed experts"
    ),
    "`kv_cache_metrics`": Setting("observability_config.kv_cache_metrics", value=True, message="kv_cache_metrics"),
    "diffusion models": Setting("vllm_config.diffusion_config", SimpleNamespace(), "diffusion models"),
    "lent memory": _LentMemory(),
}
