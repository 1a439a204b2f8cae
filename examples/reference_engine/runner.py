"""A rank's model runner: rows of running requests, and the steps that compute them.

1. A step is checked before anything changes. A step of another epoch touches no tensor.
2. All ranks hold the same rows, because they get the same steps: a step that one rank refuses, all refuse.
3. Requests of several sessions share the rows. A step has requests of one session, which become its first rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from examples.reference_engine.model import PagedBatch, ReferenceModel
from examples.reference_engine.step import RequestStep, StepInput
from kvpool.core.errors import AbortedError, InvalidArgumentError, NotFoundError, check_range
from kvpool.gpu_worker.attention_metadata import (
    CommonAttentionMetadata,
    ScheduledStep,
    StepBuffers,
    build_attn_metadata,
    init_attn_backend,
)
from kvpool.gpu_worker.block_table import BlockTables
from kvpool.gpu_worker.group_table import BlockTableOptions, Integers
from kvpool.gpu_worker.rank_pool import RankPool
from kvpool.gpu_worker.tensors import bind_kv_cache
from kvpool.gpu_worker.workspace import Workspace


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Limits of the requests on a rank, over all sessions.

    Attributes:
        max_num_reqs: Maximum number of running requests.
        max_model_len: Maximum number of tokens of a request.
        max_num_batched_tokens: Maximum number of tokens per step.
    """

    max_num_reqs: int
    max_model_len: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class _Row:
    index: int
    token_ids: list[int] = field(default_factory=list)


class ModelRunner:
    """Runs the steps of all sessions on one rank, one at a time."""

    def __init__(self, model: ReferenceModel, cache: RankPool, limits: RunnerLimits, device: torch.device) -> None:
        """Binds the model to its cache.

        Args:
            model: The part of the model on this rank.
            cache: The tensors of the rank.
            limits: Limits of the requests.
            device: Device of the model.

        Raises:
            InvalidArgumentError: The cache does not match the model's layers; names a layer.
        """
        bind_kv_cache(cache.kv_caches, model.layers)  # type: ignore[arg-type]
        self._model = model
        self._cache = cache
        self._limits = limits
        self._device = device
        options = BlockTableOptions(
            cache.num_blocks, limits.max_num_reqs, limits.max_model_len, limits.max_num_batched_tokens
        )
        self._tables = BlockTables(cache.config.groups, options, device)
        self._buffers = StepBuffers(options, device)
        self._attn_groups = init_attn_backend(cache.config.groups, model.backends, self._tables, Workspace(device))
        self._rows: dict[tuple[str, str], _Row] = {}
        self._row_at: list[_Row | None] = [None] * limits.max_num_reqs

    def __repr__(self) -> str:
        return f"<ModelRunner: {len(self._rows)} requests, epoch {self._cache.epoch}>"

    def check(self, step: StepInput) -> None:
        """Checks a step without changing anything.

        Raises:
            AbortedError: The step belongs to another epoch.
            NotFoundError: A request of the step is not running on this rank.
            InvalidArgumentError: The step does not continue the computed tokens, or exceeds a limit.
        """
        epoch = step.lease.epoch
        if epoch != self._cache.epoch:
            message = f"the step was planned in epoch {epoch}, the rank's blocks are of epoch {self._cache.epoch}"
            raise AbortedError("EPOCH_PASSED", message, field="epoch")
        keys = {(step.session, entry.request_id) for entry in step.requests}
        if len(keys) != len(step.requests):
            raise InvalidArgumentError("requests", "a request is listed twice")
        released = {(step.session, request_id) for request_id in step.released}
        running = len((self._rows.keys() - released) | keys)
        check_range("requests", running, 0, self._limits.max_num_reqs)
        scheduled = sum(entry.num_scheduled_tokens for entry in step.requests)
        check_range("num_scheduled_tokens", scheduled, 0, self._limits.max_num_batched_tokens)
        for entry in step.requests:
            known = self._rows.get((step.session, entry.request_id))
            if not entry.is_new and (known is None or entry.request_id in step.released):
                raise NotFoundError("REQUEST_NOT_FOUND", f"request {entry.request_id!r} is not running on this rank")
            self._check_request(entry, None if entry.is_new else known)

    def execute(self, step: StepInput) -> list[int] | None:
        """Runs a step.

        Returns:
            The greedy next token of each request whose tokens are all computed, in order; None on stages before the
            last.

        Raises:
            KvpoolError: As for `check`; nothing is changed.
            FloatingPointError: A logit is not finite, so memory was read that was never written.
        """
        self.check(step)
        for request_id in step.released:
            self._drop((step.session, request_id))
        rows = [self._update(step.session, entry) for entry in step.requests]
        if not rows:
            return []
        logits = self._model.forward_paged(self._batch(step.requests, rows))
        if logits is None:
            return None
        if not bool(logits.isfinite().all()):
            raise FloatingPointError("a logit is not finite: a block was read before it was written")
        return [int(token) for token in logits.argmax(-1).tolist()]

    def end_session(self, session: str) -> None:
        """Drops the requests of a session whose scheduler has ended."""
        for key in [key for key in self._rows if key[0] == session]:
            self._drop(key)

    def _check_request(self, entry: RequestStep, known: _Row | None) -> None:
        name = f"request {entry.request_id!r}"
        have = len(known.token_ids) if known else 0
        end = entry.num_computed_tokens + entry.num_scheduled_tokens
        if entry.num_scheduled_tokens < 1 or not 0 <= end <= have + len(entry.new_token_ids):
            message = f"{name}: [{entry.num_computed_tokens}, {end}) of {have + len(entry.new_token_ids)} tokens"
            raise InvalidArgumentError("num_scheduled_tokens", message)
        check_range("num_tokens", have + len(entry.new_token_ids), 1, self._limits.max_model_len)
        groups = self._cache.config.groups
        if len(entry.new_block_ids) != len(groups):
            raise InvalidArgumentError(
                "new_block_ids", f"{name}: lists for {len(entry.new_block_ids)} of {len(groups)} groups"
            )
        for table, group, block_ids in zip(self._tables.groups, groups, entry.new_block_ids, strict=True):
            blocks = len(block_ids) + (int(table.num_entries[known.index]) if known else 0)
            if blocks * group.spec.block_size < end:
                raise InvalidArgumentError("new_block_ids", f"{name}: {blocks} blocks for {end} tokens")
            if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self._cache.num_blocks):
                raise InvalidArgumentError("new_block_ids", f"{name}: not all in [0, {self._cache.num_blocks})")

    def _drop(self, key: tuple[str, str]) -> None:
        row = self._rows.pop(key, None)
        if row:
            self._tables.clear_row(row.index)
            self._row_at[row.index] = None

    def _update(self, session: str, entry: RequestStep) -> _Row:
        key = (session, entry.request_id)
        if entry.is_new:
            self._drop(key)
            index = self._row_at.index(None)
            self._rows[key] = self._row_at[index] = _Row(index)
        row = self._rows[key]
        row.token_ids += entry.new_token_ids
        self._tables.append_row(row.index, entry.new_block_ids)
        return row

    def _place(self, rows: list[_Row]) -> None:
        """Moves rows to the front of the tables, in this order."""
        for index, row in enumerate(rows):
            if row.index != index:
                self._tables.swap_rows(row.index, index)
                other = self._row_at[index]
                self._row_at[row.index], self._row_at[index] = other, row
                if other:
                    other.index = row.index
                row.index = index

    def _batch(self, requests: list[RequestStep], rows: list[_Row]) -> PagedBatch:
        """Flattens the tokens of a step, request by request."""
        self._place(rows)
        starts = np.array([entry.num_computed_tokens for entry in requests])
        step = ScheduledStep(starts, np.array([entry.num_scheduled_tokens for entry in requests]))
        ends = starts + step.num_scheduled_tokens
        tokens = [row.token_ids[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        yielding = ends == [len(row.token_ids) for row in rows]
        metadata = build_attn_metadata(self._attn_groups, self._tables, self._buffers, step)
        return PagedBatch(
            self._tensor(np.concatenate(tokens)),
            self._tensor(step.token_indices()[1]),
            cast("Mapping[str, CommonAttentionMetadata]", metadata),
            self._tensor(step.num_scheduled_tokens.cumsum()[yielding] - 1),
        )

    def _tensor(self, values: Integers) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)
