"""Drives a membership without a wire: ranks, their streams, a clock, and the messages to each."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from kvpool.core.errors import InvalidArgumentError, KvpoolError
from kvpool.core.ids import PoolName
from kvpool.core.ranks.effects import (
    Effect,
    EpochPassed,
    LinkEnded,
    MessageSent,
    PoolOpened,
    PoolResumed,
    PoolSuspended,
    SessionsFenced,
)
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import (
    Allocated,
    DeclaredMemory,
    HeldTensors,
    LinkId,
    Planned,
    PoolStatus,
    Rank,
    RankGroupOptions,
    RankState,
    RankTiming,
    Registration,
    ServerMessage,
)
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from support.refusals import Caught, Kind, refused

_Kind = TypeVar("_Kind")
LAYER = FullAttentionSpec(16, 2, 64, "bfloat16")
LAYERS = {f"layer.{i}": LAYER for i in range(2)}
BLOCK_BYTES = 2 * LAYER.page_size_bytes
TIMING = RankTiming(heartbeat_seconds=1.0, heartbeat_timeout_seconds=5.0, grace_seconds=30.0)
OPTIONS = RankGroupOptions(max_model_len=1024)


def registration(  # noqa: PLR0913 - what a rank says
    rank: int = 0,
    world_size: int = 2,
    *,
    boot_id: str = "",
    blocks: int = 100,
    layers: Mapping[str, KVCacheSpec] = LAYERS,
    options: RankGroupOptions = OPTIONS,
    held: HeldTensors | None = None,
    fences: bool = False,
) -> Registration:
    """Makes a registration with memory for `blocks` blocks."""
    return Registration(
        Rank(rank),
        world_size,
        boot_id or f"process-{rank}",
        options,
        layers,
        blocks * BLOCK_BYTES,
        held,
        last_epoch=held.epoch if held else 0,
        fences=fences,
    )


def declared(
    *,
    name: str = "m",
    blocks: int = 100,
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(LAYER, tuple(LAYERS)),),
    block_bytes: int = BLOCK_BYTES,
    fingerprint: tuple[tuple[str, str], ...] = (("model", "llama"), ("revision", "1")),
    **config: Any,
) -> DeclaredMemory:
    """Makes the memory of an engine's rank, of `blocks` blocks."""
    made = PoolConfig(PoolName(name), blocks, config.pop("max_model_len", 1024), groups, **config)
    return DeclaredMemory(made, blocks * block_bytes, fingerprint)


def declaring(rank: int = 0, world_size: int = 2, memory: DeclaredMemory | None = None, **said: Any) -> Registration:
    """Makes a registration that declares memory."""
    memory = memory or declared()
    blocks = said.pop("blocks", memory.size_bytes // BLOCK_BYTES + 1)
    made = registration(rank, world_size, blocks=blocks, layers=memory.layers, options=memory.options, **said)
    return replace(made, declared=memory)


class Gathering:
    """A membership and its effects.

    Attributes:
        members: The membership.
        now_seconds: The time.
        sent: Messages to each link, in order; the error that ended it comes last.
        pool: Effects on the pool, in order.
        epoch: The epoch that the pool is open in; 0 while it is not.
        num_blocks: Blocks that it opened with.
    """

    def __init__(self, timing: RankTiming = TIMING, max_blocks: int = 2**24) -> None:
        self.members = Membership(PoolName("m"), timing, max_blocks)
        self.now_seconds = 1000.0
        self.sent: dict[LinkId, list[ServerMessage | KvpoolError]] = defaultdict(list)
        self.pool: list[Effect] = []
        self.epoch = 0
        self.num_blocks = 0
        self.is_serving = False
        self._last_link = 0

    def register(self, said: Registration) -> LinkId:
        """Registers on a new stream; returns its link."""
        self._last_link += 1
        link = LinkId(self._last_link)
        self.do(self.members.register(link, said, self.now_seconds))
        return link

    def register_all(self, world_size: int = 2) -> list[LinkId]:
        """Registers equal ranks."""
        return [self.register(registration(rank, world_size)) for rank in range(world_size)]

    def allocate(self, link: LinkId, num_blocks: int | None = None) -> None:
        """Answers the newest plan of a link, with all blocks or `num_blocks`."""
        plan = next(message for message in reversed(self.sent[link]) if isinstance(message, Planned))
        got = plan.config.num_blocks if num_blocks is None else num_blocks
        self.do(self.members.initialized(link, Allocated(plan.epoch, got, got * BLOCK_BYTES)))

    def allocate_all(self, *links: LinkId) -> None:
        """Answers the newest plan of each link, with all blocks."""
        for link in links:
            self.allocate(link)

    def form(self, world_size: int = 2, **said: object) -> list[LinkId]:
        """Forms a pool of equal ranks."""
        base = replace(registration(), world_size=world_size, **said)  # type: ignore[arg-type]
        links = [self.register(replace(base, rank=Rank(rank), boot_id=f"process-{rank}")) for rank in range(world_size)]
        self.allocate_all(*links)
        return links

    def beat(self, *links: LinkId) -> None:
        """Sends a heartbeat on each link."""
        for link in links:
            self.do(self.members.heartbeat(link, 7, self.now_seconds))

    def break_link(self, link: LinkId, *, is_expected: bool = False) -> None:
        """Breaks the stream."""
        self.do(self.members.link_broke(link, self.now_seconds, is_expected=is_expected))

    def wait(self, seconds: float) -> None:
        """Advances the time, then detects silent ranks."""
        self.now_seconds += seconds
        self.do(self.members.tick(self.now_seconds))

    def last(self, link: LinkId) -> ServerMessage | KvpoolError:
        """The last message to a link, except answers to heartbeats."""
        return next(
            message
            for message in reversed(self.sent[link])
            if not (isinstance(message, PoolStatus) and message.heartbeat_sequence)
        )

    def expect(self, link: LinkId, kind: type[_Kind]) -> _Kind:
        """The last message to a link, which is of a kind; see `last`."""
        message = self.last(link)
        assert isinstance(message, kind)
        return message

    @property
    def opened(self) -> PoolConfig:
        """The configuration with which the pool opened last; nothing happened to it since."""
        opened = self.pool[-1]
        assert isinstance(opened, PoolOpened)
        return opened.config

    @property
    def rank_states(self) -> list[RankState]:
        return [info.state for info in self.members.registry.rank_infos()]

    def snapshot(self) -> object:
        """The visible state of the membership."""
        members = self.members
        return (
            members.epoch,
            members.state,
            members.registry.world_size,
            members.registry.options,
            members.registry.rank_infos(),
            repr(members),
        )

    def refuses(self, kind: Kind = InvalidArgumentError, **error: str | None) -> AbstractContextManager[Caught]:
        """Expects an error that changes nothing; see `refused`."""
        return refused(kind, state=self.snapshot, **error)

    def do(self, effects: list[Effect]) -> None:
        """Carries out effects as a server does."""
        for effect in effects:
            match effect:
                case LinkEnded():
                    self.sent[effect.link].append(effect.error)
                case MessageSent():
                    self.sent[effect.link].append(effect.message)
                case PoolOpened():
                    self.pool.append(effect)
                    assert effect.epoch > self.epoch, "an epoch opened twice"
                    self.epoch, self.num_blocks, self.is_serving = effect.epoch, effect.config.num_blocks, True
                case PoolSuspended():
                    self.pool.append(effect)
                    assert self.is_serving
                    self.is_serving = False
                case PoolResumed():
                    self.pool.append(effect)
                    assert not self.is_serving
                    assert self.epoch == self.members.epoch, "resumed in an epoch that was not open"
                    self.is_serving = True
                case SessionsFenced():
                    self.pool.append(effect)
                case EpochPassed():
                    self.pool.append(effect)
                    assert effect.epoch > self.epoch
                    self.is_serving = False
