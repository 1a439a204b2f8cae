"""A pool of the reference model kept by hand: random blocks, tables, and NaN in all blocks that must not be read."""

import random
from collections.abc import Sequence

import torch

from examples.reference_engine.collectives import Alone
from examples.reference_engine.config import ReferenceConfig
from examples.reference_engine.model import PagedBatch, ReferenceModel
from examples.reference_engine.runner import ModelRunner, RunnerLimits
from examples.reference_engine.step import RequestStep, StepInput
from kvpool.core.ids import NULL_BLOCK, SessionNumber, TableLease
from kvpool.core.planning.plan import GIB, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.kinds import allocation_spec
from kvpool.gpu_worker.rank_pool import RankPool
from kvpool.gpu_worker.tensors import allocate_buffers, reshape_kv_cache

torch.set_num_threads(1)  # tensors are tiny: threads would wait for each other most of the time

NUM_BLOCKS = 120
EPOCH = 3
LEASE = TableLease(EPOCH, SessionNumber(1))
LIMITS = RunnerLimits(max_num_reqs=6, max_model_len=64, max_num_batched_tokens=48)


class RecordingModel(ReferenceModel):
    """Records the logits of the last step."""

    logits: torch.Tensor | None = None

    def forward_paged(self, batch: PagedBatch) -> torch.Tensor | None:
        self.logits = super().forward_paged(batch)
        return self.logits


class Rank:
    """A rank, and the blocks of its pool.

    Attributes:
        runner: Its runner.
        buffers: All its memory.
    """

    def __init__(
        self, config: ReferenceConfig, device: torch.device, layout: str = "flash_attn", seed: int = 0
    ) -> None:
        self.model = RecordingModel(config, device, Alone(), layout=layout)
        options = PlanOptions(
            LIMITS.max_model_len,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens,
            num_blocks_override=NUM_BLOCKS,
        )
        self.config = get_kv_cache_configs([RankMemory(self.model.kv_cache_specs, GIB)], options).configs[0]
        self.specs = [allocation_spec(group.spec) for group in self.config.groups]
        self.buffers = allocate_buffers(self.config, device)
        views = reshape_kv_cache(self.config, NUM_BLOCKS, self.buffers, self.model.layouts)
        pool = RankPool(EPOCH, NUM_BLOCKS, self.config, LIMITS.max_model_len, views, self.buffers)
        self.runner = ModelRunner(self.model, pool, LIMITS, device)
        self.free = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(self.free)  # noqa: S311 - any order does
        self.poison_all_but([])

    def poison_all_but(self, block_ids: Sequence[int]) -> None:
        """Fills all other blocks with NaN, including the null block."""
        poisoned = torch.ones(NUM_BLOCKS, dtype=torch.bool)
        poisoned[list(block_ids)] = False
        for buffer in self.buffers:
            buffer.view(NUM_BLOCKS, -1)[poisoned.to(buffer.device)] = -1

    def step(self, *requests: RequestStep, released: Sequence[str] = (), session: str = "s") -> list[int]:
        tokens = self.runner.execute(StepInput(LEASE, session, list(requests), list(released)))
        assert tokens is not None
        return tokens


class RunningRequest:
    """A request, its tables kept as the service keeps them.

    Attributes:
        token_ids: All its tokens, computed or not.
        num_computed_tokens: Tokens that are in the blocks.
        tables: Its blocks, by group; null where nothing is looked at any more.
    """

    def __init__(self, rank: Rank, request_id: str, token_ids: Sequence[int]) -> None:
        self._rank = rank
        self._is_new = True
        self._num_known = 0
        self.request_id = request_id
        self.token_ids = list(token_ids)
        self.num_computed_tokens = 0
        self.tables: list[list[int]] = [[] for _ in rank.specs]

    def take_prefix(self, other: "RunningRequest", num_tokens: int) -> None:
        """Starts with blocks that another request computed, as after a hit."""
        self.num_computed_tokens = num_tokens
        for table, theirs, spec in zip(self.tables, other.tables, self._rank.specs, strict=True):
            table.extend(theirs[: num_tokens // spec.block_size])
        self._skip()

    def schedule(self, num_tokens: int) -> RequestStep:
        """Allocates blocks for the next tokens, and describes the step."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        self._skip()
        new_block_ids = []
        for table, spec in zip(self.tables, self._rank.specs, strict=True):
            have = 0 if self._is_new else len(table)
            table.extend(self._rank.free.pop() for _ in range(-(-end // spec.block_size) - len(table)))
            new_block_ids.append(table[have:])
        step = RequestStep(
            self.request_id, self._is_new, start, num_tokens, self.token_ids[self._num_known :], new_block_ids
        )
        self._is_new, self._num_known, self.num_computed_tokens = False, len(self.token_ids), end
        return step

    @property
    def blocks(self) -> list[int]:
        """The blocks that the request holds."""
        return [block for table in self.tables for block in table if block != NULL_BLOCK]

    def _skip(self) -> None:
        """Replaces skipped blocks with null; they are then filled with NaN like all free blocks."""
        for table, spec in zip(self.tables, self._rank.specs, strict=True):
            skipped = min(spec.num_skipped_tokens(self.num_computed_tokens) // spec.block_size, len(table))
            table[:skipped] = [NULL_BLOCK] * skipped
