"""What the steps of an engine leave in its blocks, to check what they read and where they write."""

from collections.abc import Iterator
from typing import Any

from engine.driving import STATES, Setup, token_at
from engine.schedules import Outcome


class BlockContents:
    """Of each block, the prefix of tokens at whose end the block was last written.

    A slot of attention holds what follows from all tokens up to its own, a state what follows from all before it.
    """

    def __init__(self, setup: Setup, outcome: Outcome) -> None:
        spans = setup.block_sizes or (setup.block_size,) * len(setup.windows)
        self._groups = [(i, span, setup.windows[i] == STATES) for i, span in enumerate(spans)]
        self._writes_boundaries = setup.exports_states
        self._tokens = {
            request_id: [*prompt, *(token_at(request_id, place) for place in range(len(prompt), setup.max_model_len))]
            for request_id, prompt in outcome.prompts.items()
        }
        self._tables: dict[str, list[list[int]]] = {}
        self._contents: dict[int, int] = {}

    def run(self, step: Any) -> None:
        """Runs a step: no two requests write to one block, and each reads what its own tokens have left."""
        if isinstance(step, bool):  # the answer to a reset
            return
        starts = self._extend_tables(step)
        writes = [write for request_id, count in step["tokens"] for write in self._writes(request_id, starts, count)]
        written = dict(writes)
        assert len(written) == len(writes)
        self._contents.update(written)
        for request_id in {request_id for request_id, *_ in step["new"]} | {*step["resumed"]}:
            for i, span, has_states in self._groups:  # hits, also of what other requests write in this step
                hit = self._tables[request_id][i][: starts[request_id] // span]
                for at, block_id in enumerate(hit if not has_states else ()):
                    self._check(block_id, request_id, (at + 1) * span)

    def _extend_tables(self, step: Any) -> dict[str, int]:
        """Updates the block tables; returns the number of computed tokens of each request that is scheduled."""
        for request_id in (*step["finished"], *step["preempted"]):
            self._tables.pop(request_id, None)
        for request_id in (*(request_id for request_id, *_ in step["new"]), *step["resumed"]):
            self._tables[request_id] = [[] for _ in self._groups]
        starts = {}
        for request_id, num_computed, new in (*step["new"], *step["cached"]):
            starts[request_id] = num_computed
            for table, block_ids in zip(self._tables[request_id], new or (), strict=bool(new)):
                table.extend(block_ids)
        return starts

    def _writes(self, request_id: str, starts: dict[str, int], num_tokens: int) -> Iterator[tuple[int, int]]:
        """The blocks that a step writes, with what it leaves in them. It reads states before."""
        start, end = starts[request_id], starts[request_id] + num_tokens
        for i, span, has_states in self._groups:
            table, first, last = self._tables[request_id][i], start // span, (end - 1) // span
            if has_states:
                if start:
                    self._check(table[(start - 1) // span] or -1, request_id, start)
                first = max(first, last - self._writes_boundaries)
            for at in range(first, last + 1):
                if table[at]:
                    yield table[at], self._prefix(request_id, min((at + 1) * span, end))

    def _check(self, block_id: int, request_id: str, num_tokens: int) -> None:
        assert not block_id or self._contents.get(block_id) == self._prefix(request_id, num_tokens), (
            request_id,
            block_id,
            num_tokens,
        )

    def _prefix(self, request_id: str, num_tokens: int) -> int:
        return hash(tuple(self._tokens[request_id][:num_tokens]))
