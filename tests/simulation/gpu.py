"""Memory of a GPU in which every slot keeps its content, and steps that read before they write.

A token's content is a number for the token, all tokens before it, and the weights that computed each. So a slot with
the right content holds the data that a real model would have written. A state (Mamba) holds the content of the last
token that updated it. Blocks of host memory have such slots, too, which only copies read and write.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.ids import GroupId
from kvpool.core.specs.kinds import MambaSpec, allocation_spec
from kvpool.core.specs.pool_config import PoolConfig

_GROUP_SALT = 0x9E3779B97F4A7C15
_MASK = 2**62 - 1


class Violation(AssertionError):  # noqa: N818 - a finding, not an error of this code
    """A violation of an invariant."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How the blocks of a group are read and written."""

    span_tokens: int
    spec: object
    is_state: bool

    def first_read(self, num_computed: int) -> int:
        """First token that a step reads after `num_tokens` tokens."""
        return self.spec.num_skipped_tokens(num_computed)  # type: ignore[attr-defined,no-any-return]


def layouts(config: PoolConfig) -> tuple[GroupLayout, ...]:
    """The layouts of a pool's groups."""
    specs = [allocation_spec(group.spec) for group in config.groups]
    return tuple(
        GroupLayout(config.span_tokens(GroupId(i)), spec, isinstance(spec, MambaSpec)) for i, spec in enumerate(specs)
    )


def extend_contents(contents: list[list[int]], token_ids: Sequence[int], salt: int, weights: int) -> None:
    """Adds, group by group, the contents of tokens that are new in `token_ids`, computed with these weights."""
    first = contents[0]
    last = first[-1] if first else salt
    for position in range(len(first), len(token_ids)):
        last = hash((last, token_ids[position], weights)) & _MASK
        first.append(last)
    for group, of_group in enumerate(contents[1:], 1):
        of_group += [content ^ (group * _GROUP_SALT) for content in first[len(of_group) :]]


@dataclass(frozen=True, slots=True)
class Computation:
    """A step's work for one request: tokens [start, end) with the block tables of all groups."""

    name: str
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does on each rank.

    Attributes:
        copies: Source and target of the copies that it makes first, in order.
        computations: Its work for each request.
    """

    copies: tuple[tuple[int, int], ...]
    computations: tuple[Computation, ...]


class Memory:
    """The blocks of one rank.

    Args:
        num_blocks: Number of blocks, those of host memory included.
        groups: The layouts of its groups.
    """

    def __init__(self, num_blocks: int, groups: Sequence[GroupLayout]) -> None:
        self._groups = groups
        slots = max(group.span_tokens for group in groups)
        self._cells = [[0] * slots for _ in range(num_blocks)]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, in order."""
        for source, target in copies:
            self.begin_copy(source, target)
            self.end_copy(source, target)

    def begin_copy(self, source: int, target: int) -> None:
        """Copies the second half of a block. That of a state is empty."""
        middle = len(self._cells[source]) // 2
        self._cells[target][middle:] = self._cells[source][middle:]

    def end_copy(self, source: int, target: int) -> None:
        """Copies the first half of a block."""
        middle = len(self._cells[source]) // 2
        self._cells[target][:middle] = self._cells[source][:middle]

    def begin(self, work: Sequence[Computation]) -> None:
        """Starts a step: each computation reads its slots, except those that another computation of the step writes.

        Raises:
            Violation: A slot has unexpected content.
        """
        writers = {block: one for one in work for block in self._written(one)}
        for one in work:
            others = {block for block, writer in writers.items() if writer is not one}
            self._read(one, others, has_written=False)

    def finish(self, work: Sequence[Computation]) -> None:
        """Ends a step: writes, then reads all slots again, as a layer writes all keys before it attends.

        Raises:
            Violation: A slot has unexpected content, or no block.
        """
        for one in work:
            self._write(one)
        for one in work:
            self._read(one, set(), has_written=True)

    def _written(self, work: Computation) -> list[int]:
        spans = [group.span_tokens for group in self._groups]
        tables = zip(work.tables, spans, strict=True)
        return [b for table, span in tables for b in table[work.start // span : (work.end - 1) // span + 1]]

    def _read(self, work: Computation, unwritten: set[int], *, has_written: bool) -> None:
        for group_id, group in enumerate(self._groups):
            table, contents, span = work.tables[group_id], work.contents[group_id], group.span_tokens
            at = group.first_read(work.start)
            if group.is_state:
                if has_written and at // span == work.start // span:
                    continue  # the earlier state was overwritten
                wanted = contents[at : work.start]
                if wanted and table[at // span] not in unwritten:
                    self._check(work, group_id, table[at // span], 0, wanted)
                continue
            while at < work.start:
                end = min(work.start, at - at % span + span)
                if table[at // span] not in unwritten:
                    self._check(work, group_id, table[at // span], at % span, contents[at:end])
                at = end

    def _write(self, work: Computation) -> None:
        for group_id, group in enumerate(self._groups):
            table, contents, span = work.tables[group_id], work.contents[group_id], group.span_tokens
            at = work.start
            while at < work.end:
                end = min(work.end, at - at % span + span)
                block = table[at // span]
                if not block:
                    raise Violation(f"{work.name}: group {group_id} has no block for token {at}")
                if group.is_state:
                    self._cells[block][0] = contents[end - 1]
                else:
                    self._cells[block][at % span : at % span + end - at] = contents[at:end]
                at = end

    def _check(self, work: Computation, group_id: int, block: int, offset: int, wanted: Sequence[int]) -> None:
        if not block or self._cells[block][offset : offset + len(wanted)] != list(wanted):
            raise Violation(
                f"{work.name}: computes [{work.start}, {work.end}), block {block} of group {group_id} does not hold "
                f"what it was given for, from slot {offset} on"
            )
