"""Random schedules, by what they use of vLLM: each is run by a scheduler of vLLM's and by the one on the service."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.connector import Calls
from engine.driving import STATES, Driver, Setup, images, make_scheduler

_HASHES_AHEAD: Final = {"num_drafts": 3, "uses_eagle": True, "hashes_ahead": True}
_MODULES: Final = {"num_drafts": 3, "uses_eagle": True, "has_modules": True}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "first_come": {},
    "priority": {"policy": "priority"},
    "a_step_ahead": {"is_async": True},
    "prefill_every_fourth_step": {"prefill_interval": 4},
    "without_caching": {"enable_caching": False},
    "windows": {"windows": (0, 40, 40), "retention_tokens": None},
    "windows_a_step_ahead": {"windows": (0, 40, 40), "retention_tokens": None, "is_async": True},
    "sparse_windows": {"windows": (0, 40, 40)},
    "sparse_windows_a_step_ahead": {"windows": (0, 40, 100), "is_async": True},
    "windows_in_segments": {"windows": (0, 40, 40), "retention_tokens": 64},
    "one_window": {"windows": (40,), "retention_tokens": None},
    "sizes": {"windows": (0, 40, 40), "block_sizes": (16, 32, 32)},
    "sizes_a_step_ahead": {"windows": (0, 40), "block_sizes": (32, 16), "is_async": True},
    "sizes_in_segments": {"windows": (0, 40), "block_sizes": (16, 32), "retention_tokens": 128},
    "sizes_with_all_windows": {"windows": (0, 40), "block_sizes": (16, 32), "retention_tokens": None},
    "sizes_with_drafts": {"windows": (0, 40), "block_sizes": (16, 48), "num_drafts": 3},
    "states": {"windows": (0, STATES, STATES)},
    "states_a_step_ahead": {"windows": (0, STATES), "is_async": True},
    "states_in_segments": {"windows": (0, STATES), "retention_tokens": 64},
    "all_states": {"windows": (0, STATES), "retention_tokens": None},
    "exported_states": {"windows": (0, STATES), "exports_states": True},
    "all_exported_states": {"windows": (0, STATES, STATES), "exports_states": True, "retention_tokens": None},
    "states_with_drafts": {"windows": (0, STATES), "num_drafts": 3},
    "states_with_eagle": {
        "windows": (0, STATES, STATES),
        "num_drafts": 2,
        "uses_eagle": True,
        "draft_groups": (0,),
    },
    "exported_states_with_drafts": {"windows": (0, STATES), "exports_states": True, "num_drafts": 1},
    "larger_states": {"windows": (0, STATES, STATES), "block_sizes": (16, 32, 32)},
    "larger_states_a_step_ahead": {"windows": (0, STATES), "block_sizes": (16, 64), "is_async": True},
    "all_larger_states": {"windows": (0, STATES, STATES), "block_sizes": (16, 48, 48), "retention_tokens": None},
    "larger_states_in_segments": {"windows": (0, 40, STATES), "block_sizes": (32, 16, 64), "retention_tokens": 128},
    "larger_states_with_drafts": {"windows": (0, STATES), "block_sizes": (16, 32), "num_drafts": 3},
    "larger_exported_states": {"windows": (0, STATES), "block_sizes": (16, 64), "exports_states": True},
    "smaller_states": {"windows": (0, STATES), "block_sizes": (32, 16)},
    "states_with_a_larger_window": {"windows": (0, 40, STATES), "block_sizes": (16, 32, 64)},
    "match_unit": {"windows": (0, STATES), "block_size": 64, "match_unit": 16},
    "match_unit_a_step_ahead": {"windows": (0, STATES, STATES), "block_size": 32, "match_unit": 8, "is_async": True},
    "match_unit_with_drafts": {"windows": (0, STATES), "block_size": 32, "match_unit": 16, "num_drafts": 2},
    "match_unit_with_exported_states": {
        "windows": (0, STATES),
        "block_size": 64,
        "match_unit": 16,
        "exports_states": True,  # with all states cached, vLLM hits one that a step left behind after a partial hit
    },
    "match_unit_with_eagle": {
        "windows": (0, STATES, STATES),
        "block_size": 32,
        "match_unit": 16,
        "num_drafts": 2,
        "uses_eagle": True,
        "draft_groups": (0,),
    },
    "larger_states_with_eagle": {
        "windows": (0, STATES),
        "block_sizes": (16, 32),
        "num_drafts": 2,
        "uses_eagle": True,
        "draft_groups": (0,),
        "retention_tokens": None,
    },
    "match_unit_without_states": {"windows": (0, 40), "block_size": 32, "match_unit": 16},
    "drafts": {"num_drafts": 3},
    "drafts_with_eagle": {"num_drafts": 3, "uses_eagle": True},
    "eagle_beside_windows": {
        "windows": (0, 40, 40),
        "num_drafts": 3,
        "uses_eagle": True,
        "draft_groups": (0,),
        "retention_tokens": None,
    },
    "drafts_with_hashes_ahead": {**_HASHES_AHEAD},
    "windows_with_hashes_ahead": {**_HASHES_AHEAD, "windows": (0, 40, 40)},
    "sizes_with_hashes_ahead": {**_HASHES_AHEAD, "windows": (0, 40), "block_sizes": (16, 32)},
    "states_with_hashes_ahead": {**_HASHES_AHEAD, "windows": (0, STATES)},
    "exported_states_with_hashes_ahead": {**_HASHES_AHEAD, "windows": (0, STATES), "exports_states": True},
    "sparse_windows_with_eagle": {"num_drafts": 3, "uses_eagle": True, "windows": (0, 40, 40)},
    "several_modules": {**_MODULES},
    "several_modules_with_windows": {**_MODULES, "windows": (0, 40), "retention_tokens": None},
    "several_modules_with_hashes_ahead": {**_MODULES, "hashes_ahead": True},
    "several_modules_with_hashes_ahead_and_windows": {**_MODULES, "hashes_ahead": True, "windows": (0, 40)},
    "replayed_windows": {"windows": (0, 40), "replays": True, "retention_tokens": None},
    "replayed_windows_in_small_chunks": {
        "windows": (0, 72),
        "replays": True,
        "retention_tokens": None,
        "long_prefill_tokens": 24,
    },
    "replayed_windows_a_step_ahead": {"windows": (0, 40), "replays": True, "retention_tokens": None, "is_async": True},
    "replayed_windows_with_eagle": {
        "windows": (0, 40),
        "replays": True,
        "retention_tokens": None,
        "num_drafts": 3,
        "uses_eagle": True,
    },
    "drafts_in_windows": {"num_drafts": 3, "windows": (0, 40, 40), "retention_tokens": None},
    "images": {"encoder_budget": 1000},
    "images_beyond_the_budget": {"encoder_budget": 60},
    "images_a_step_ahead": {"encoder_budget": 120, "is_async": True},
    "images_in_one_piece": {  # in chunks in which every image fits
        "encoder_budget": 120,
        "splits_images": False,
        "long_prefill_tokens": 0,
        "max_num_batched_tokens": 256,
    },
    "images_with_eagle": {"encoder_budget": 120, "num_drafts": 3, "uses_eagle": True},
    "images_without_caching": {"encoder_budget": 120, "enable_caching": False},
    "connector": {"load_failures": "recompute", "num_blocks": 80},
    "connector_that_fails_requests": {"load_failures": "fail", "num_blocks": 80},
    "connector_a_step_ahead": {"load_failures": "recompute", "num_blocks": 80, "is_async": True},
    "connector_a_step_ahead_that_fails_requests": {"load_failures": "fail", "num_blocks": 60, "is_async": True},
    "connector_without_caching": {"load_failures": "recompute", "num_blocks": 80, "enable_caching": False},
}
"""By name, what of `Setup` is not drawn."""
MIXED: Final = frozenset({
    "windows_a_step_ahead", "one_window", "sizes_a_step_ahead", "sizes_in_segments", "sizes_with_all_windows",
    "states_in_segments", "all_states", "all_exported_states", "larger_states", "larger_states_a_step_ahead",
    "all_larger_states", "larger_states_with_drafts", "larger_exported_states", "states_with_a_larger_window",
    "match_unit_a_step_ahead", "match_unit_with_drafts", "match_unit_with_exported_states", "larger_states_with_eagle",
    "match_unit_without_states", "sparse_windows_with_eagle", "several_modules_with_windows",
    "replayed_windows_in_small_chunks", "replayed_windows_a_step_ahead", "drafts_in_windows", "images_in_one_piece",
    "images_with_eagle", "images_without_caching", "connector_that_fails_requests", "connector_without_caching",
})  # fmt: skip
"""Kinds that mix what other kinds have: the tests of the core compare such mixes more often."""
MOST_STEPS: Final = 3000


@dataclass
class Outcome:
    """What a run of a workload comes to."""

    steps: list[Any]
    prompts: dict[str, list[int]]
    generated: dict[str, list[int]]
    cached: dict[str, int]
    lookups: dict[str, int]
    num_preemptions: int
    calls: Calls | None


def setup_of(kind: Mapping[str, Any], seed: int) -> Setup:
    """Draws what a kind leaves open."""
    rng = random.Random(f"setup {seed}")
    drawn = Setup(
        num_blocks=rng.choice([80, 120, 160, 400]),
        max_num_seqs=rng.choice([4, 8, 16]),
        max_num_batched_tokens=rng.choice([64, 256, 512]),
        watermark=rng.choice([0, 0, 0.05]),
        reserves_sequence=rng.random() < 0.7,
        long_prefill_tokens=rng.choice([0, 0, 48]),
    )
    return replace(drawn, **kind)


def run(scheduler_class: Any, setup: Setup, seed: int, folder: Path, num_requests: int = 30) -> Outcome:
    """Puts requests in at random, aborts some, resets the cache now and then, until all have ended."""
    rng = random.Random(f"run {seed}")
    scheduler = make_scheduler(scheduler_class, setup, folder)
    driver = Driver(scheduler, setup)
    prefixes = [[rng.randrange(512) for _ in range(rng.randrange(200))] for _ in range(3)]
    steps: list[Any] = []
    count = 0
    while count < num_requests or not driver.is_idle:
        assert len(steps) < MOST_STEPS, "nothing moves any more"
        while count < num_requests and rng.random() < 0.4:
            prompt = rng.choice(prefixes) + [rng.randrange(512) for _ in range(rng.randrange(1, 200))]
            values: dict[str, Any] = {"cache_salt": rng.choice("ab")} if rng.random() < 0.2 else {}
            if rng.random() < 0.05:
                values["sampling"] = {"prompt_logprobs": 1}  # reads no cache
            if setup.policy == "priority":
                values["priority"] = rng.randrange(3)
            if setup.encoder_budget:
                values["mm_features"] = images(prompt)
            driver.add(f"r{count}", prompt, rng.randrange(1, 60), **values)
            count += 1
        if count and rng.random() < 0.02:
            driver.abort(f"r{rng.randrange(count)}")
        if rng.random() < 0.01:
            resets_running = rng.random() < 0.3 and not setup.load_failures  # which vLLM has not beside connectors
            steps.append(scheduler.reset_prefix_cache(reset_running_requests=resets_running))
        steps.append(driver.step())
    driver.drain()
    preemptions = sum(request.num_preemptions for request in driver.requests.values())
    scheduler.shutdown()
    calls = scheduler.connector and scheduler.connector.calls
    prompts = {each.request_id: list(each.prompt_token_ids) for each in driver.requests.values()}
    return Outcome(steps, prompts, driver.generated, driver.cached, driver.lookups, preemptions, calls)
