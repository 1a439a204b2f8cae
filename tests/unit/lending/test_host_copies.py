"""Blocks are copied between the tiers of a rank, in order, wherever a block's bytes are."""

import random
import threading
from collections.abc import Sequence
from typing import Final

import pytest
import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.lending import host_copies
from kvpool.lending.host_copies import CopyReport, HostCopies, Region
from support.torch import on_each_device

NUM_BLOCKS: Final = 12
NUM_SLOTS: Final = 7
PADDING_BYTES: Final = 24
"""Bytes of the memory behind its blocks."""
LAYOUTS: Final = {
    "one region": (64,),
    "layers": (16, 16, 16),
    "layers of several sizes": (8, 48, 24),
    "odd sizes": (3, 10, 1),
}
"""Bytes of a block in each region."""


@pytest.fixture(params=LAYOUTS)
def sizes(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return LAYOUTS[request.param]


class Tiers:
    """Two tiers of random bytes, and what they should contain."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.regions = [Region(start * NUM_BLOCKS, size) for start, size in zip(starts, sizes, strict=True)]
        self.buffer = torch.randint(-128, 128, (sum(sizes) * NUM_BLOCKS + PADDING_BYTES,), dtype=torch.int8).to(device)
        self.host = torch.randint(-128, 128, (NUM_SLOTS, sum(sizes)), dtype=torch.int8)
        self.copies = HostCopies(self.buffer, self.regions, self.host, NUM_BLOCKS)
        self.expected, self.padding = self.blocks(), self.buffer[-PADDING_BYTES:].clone()

    def blocks(self) -> list[list[int]]:
        """The bytes of each block of both tiers, as a slot has them."""
        blocks = []
        for i in range(NUM_BLOCKS):
            places = [range(at + i * size, at + (i + 1) * size) for at, size in self.regions]
            blocks.append([int(self.buffer[place]) for each in places for place in each])
        return [*blocks, *self.host.tolist()]

    def copy(self, *pairs: tuple[int, int]) -> None:
        """Makes copies, and checks the bytes of every block."""
        self.copies.make(pairs)
        self.copies.wait()
        if self.buffer.is_cuda:
            torch.cuda.synchronize()
        for source, target in pairs:
            self.expected[target] = self.expected[source]
        assert self.blocks() == self.expected
        assert torch.equal(self.buffer[-PADDING_BYTES:], self.padding)


@pytest.fixture
def tiers(sizes: tuple[int, ...]) -> Tiers:
    torch.manual_seed(1)
    return Tiers(sizes, torch.device("cpu"))


def slot(number: int) -> int:
    """The id of a slot."""
    return NUM_BLOCKS + number


def test_blocks_are_demoted_and_promoted(tiers: Tiers) -> None:
    tiers.copy((3, slot(2)), (1, slot(3)), (11, slot(0)))
    tiers.copy((slot(2), 5), (slot(0), 0))
    tiers.copy()


def test_a_later_copy_reads_what_an_earlier_one_wrote(tiers: Tiers) -> None:
    tiers.copy((3, slot(2)), (slot(2), 5), (5, slot(4)), (slot(4), 6))


def test_a_later_copy_overwrites_what_an_earlier_one_read_or_wrote(tiers: Tiers) -> None:
    tiers.copy((3, slot(2)), (slot(1), 3), (3, slot(1)))
    tiers.copy((4, slot(2)), (5, slot(2)), (slot(2), 7), (slot(3), 7))


def test_a_block_is_copied_to_several(tiers: Tiers) -> None:
    tiers.copy((3, slot(2)), (3, slot(4)), (slot(2), 8), (slot(2), 9))


@on_each_device
def test_every_block_is_right_after_random_copies(
    sizes: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are longer than what is copied at once."""
    monkeypatch.setattr(host_copies, "_STAGING_BYTES", 150)
    rng = random.Random(str(sizes))  # noqa: S311 - no secret
    tiers = Tiers(sizes, device)
    for _ in range(20):
        pairs: list[tuple[int, int]] = []
        while len(pairs) < 30:
            demotes = rng.random() < 0.5
            for _ in range(rng.randrange(1, 9)):
                block, other = rng.randrange(NUM_BLOCKS), slot(rng.randrange(NUM_SLOTS))
                pairs.append((block, other) if demotes else (other, block))
        tiers.copy(*pairs)


@on_each_device
def test_times_are_counted_by_direction(device: torch.device) -> None:
    tiers = Tiers((16, 16), device)
    tiers.copy((3, slot(2)), (1, slot(3)))
    demoted = tiers.copies.report
    assert demoted.demotion_microseconds > 0 == demoted.promotion_microseconds
    tiers.copy((slot(2), 5))
    promoted = tiers.copies.report
    assert promoted.promotion_microseconds > 0
    assert promoted.demotion_microseconds == demoted.demotion_microseconds


def test_copies_in_the_background_are_made_beside_others(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy, made_here = threading.Event(), HostCopies._made_here

    def slow(copies: HostCopies, pairs: list[tuple[int, int]]) -> object:
        assert threading.current_thread() is threading.main_thread() or may_copy.wait(60)
        return made_here(copies, pairs)

    monkeypatch.setattr(HostCopies, "_made_here", slow)
    event = tiers.copies.begin([(slot(2), 5), (slot(0), 6)])
    tiers.copies.make([(3, slot(4))])
    tiers.copies.join(0)
    assert (event.query(), tiers.copies.report.num_made, tiers.blocks()[5]) == (False, 0, tiers.expected[5])
    tiers.copies.begin([(slot(1), 7)])
    may_copy.set()
    tiers.copies.join(1)
    assert event.query()
    assert tiers.blocks()[5:7] == [tiers.expected[slot(2)], tiers.expected[slot(0)]]
    tiers.copies.wait()
    assert (tiers.copies.report.num_made, tiers.blocks()[7]) == (2, tiers.expected[slot(1)])
    assert tiers.copies.report.promotion_microseconds > 0


@on_each_device
def test_steps_come_after_the_copies_in_the_background_that_they_join(device: torch.device) -> None:
    tiers = Tiers((1 << 10,), device)
    for value in range(20):
        tiers.host.fill_(value)
        tiers.copies.begin([(slot(i), i) for i in range(NUM_SLOTS)])
        tiers.copies.join(value + 1)
        found = tiers.buffer[:-PADDING_BYTES].view(NUM_BLOCKS, -1)[:NUM_SLOTS].clone()
        tiers.copies.wait()  # the host may write to the slots again
        assert bool((found == value).all())
    assert tiers.copies.report.num_made == 20


@on_each_device
@pytest.mark.parametrize(
    "pair", [(0, 1), (slot(0), slot(1)), (-1, slot(0)), (3, slot(NUM_SLOTS)), (slot(NUM_SLOTS), 3)]
)
def test_a_copy_that_is_not_between_the_tiers_is_refused(pair: tuple[int, int], device: torch.device) -> None:
    tiers = Tiers((16, 16), device)
    for copy in (tiers.copies.make, tiers.copies.begin):
        with pytest.raises(InvalidArgumentError, match="is not between a block of each tier"):
            copy([(3, slot(2)), pair])
    assert tiers.blocks() == tiers.expected
    assert tiers.copies.report == CopyReport()


@on_each_device
def test_copies_come_between_the_steps_around_them(device: torch.device) -> None:
    """On a device, which then has many of them to do, without a wait of the host."""
    tiers = Tiers((1024,), device)
    for value in range(50):
        tiers.buffer.fill_(value)
        tiers.copies.make([(i, slot(i)) for i in range(NUM_SLOTS)])
        tiers.buffer.fill_(-1)
        tiers.copies.make([(slot(i), i) for i in range(3)])
    if device.type == "cuda":
        torch.cuda.synchronize()
    blocks = tiers.buffer[:-PADDING_BYTES].view(NUM_BLOCKS, -1)
    assert blocks.float().mean(dim=1).tolist() == [49.0] * 3 + [-1.0] * (NUM_BLOCKS - 3)
    assert tiers.host.float().mean(dim=1).tolist() == [49.0] * NUM_SLOTS
