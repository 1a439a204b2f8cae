"""Replaces vLLM's classes with those of kvpool, before vLLM's tests import them."""

import sys
from typing import Any, Final

import pytest
from vllm.config import ModelConfig
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.sched import async_scheduler, scheduler

from engine.own import pools
from engine.own.block_views import show_blocks
from engine.own.lone_manager import LoneManager
from engine.own.made_up_models import TAKES_IMAGES, EncoderBudget
from engine.own.planner_pair import PLANNING, plan_with_both
from kvpool.client.vllm.scheduler import AsyncScheduler, Scheduler


class PoolScheduler(Scheduler):
    """A scheduler on a pool of its own, whose blocks tests can look at."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.additional_config = {"kvpool": {"address": pools.server().address, "pool": pools.new_name()}}
        settings = {"deadline_seconds": pools.DEADLINE_SECONDS, "reserve_tokens": 0}  # blocks in vLLM's order
        vllm_config.additional_config["kvpool"].update(settings)
        super().__init__(vllm_config, *args, **kwargs)
        pools.close_later(self._kvpool.session)
        show_blocks(self.kv_cache_manager)


class PoolAsyncScheduler(PoolScheduler, AsyncScheduler):
    """One that schedules a step ahead."""


_PLACES: Final = (
    (scheduler, "Scheduler"),
    (async_scheduler, "AsyncScheduler"),
    (kv_cache_manager, "KVCacheManager"),
)
_REPLACEMENTS: Final = (PoolScheduler, PoolAsyncScheduler, LoneManager)
_REPLACED: Final = [PLANNING.get_kv_cache_configs, *(getattr(module, name) for module, name in _PLACES)]


def make_up_images() -> None:
    """Lets some of the made-up models take images."""
    scheduler.MultiModalBudget = EncoderBudget
    takes_images = property(lambda config: config.model in TAKES_IMAGES)
    ModelConfig.supports_multimodal_inputs = takes_images


def replace_classes(patch: pytest.MonkeyPatch) -> None:
    """Puts kvpool's classes where vLLM's tests import vLLM's. The planner stays: tests of 0.33 look it up late."""
    PLANNING.get_kv_cache_configs = plan_with_both
    for (module, name), replacement in zip(_PLACES, _REPLACEMENTS, strict=True):
        patch.setattr(module, name, replacement)


def missed() -> list[str]:
    """Returns the places in modules of vLLM's tests where vLLM's classes were imported before they were replaced."""
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "tests"]
    return [
        f"{module.__name__}.{name}"
        for module in loaded
        for name, value in vars(module).items()
        if any(value is replaced for replaced in _REPLACED)
    ]
