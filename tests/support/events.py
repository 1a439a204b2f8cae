"""A router's side of the ZeroMQ transport, as docs/how-to/block-events.md describes it, without I/O."""

from collections import deque
from typing import Any

import msgspec

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import BlockHash
from kvpool.server.events import publisher

END = publisher.END_OF_REPLAY
Entry = tuple[int, int]


def as_integer(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def truth(pool: KVCacheManager) -> set[Entry]:
    """The cached blocks of a pool, in the form that a subscriber keeps."""
    return {(group_id, as_integer(block_hash)) for group_id, block_hash, _ in pool.blocks.prefix_map.entries()}


class Subscriber:
    """Keeps the map of cached blocks from one publisher's messages, and decides which requests to send.

    Attributes:
        known: What is cached, by (group, hash).
        next: Number of the next message; None before the first snapshot.
        boot_id: The publisher's boot.
        asks: Requests to be sent to the replay socket; the answers go to `answer`, whole, in order.
        num_replays: Replays that closed a gap.
        num_snapshots: Snapshots taken.
    """

    def __init__(self) -> None:
        self.known: set[Entry] = set()
        self.next: int | None = None
        self.boot_id = ""
        self.asks: deque[bytes] = deque([publisher.SNAPSHOT_REQUEST])
        self.num_replays = self.num_snapshots = 0
        self._waiting: deque[tuple[int, bytes]] = deque()  # live messages that arrived while a reply is pending
        self._newest = -1
        self._asked = True

    @property
    def is_settled(self) -> bool:
        """Whether no request is pending."""
        return not self._asked

    def live(self, frames: list[bytes]) -> None:
        """Handles a message of the live socket."""
        _, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big")
        if number <= self._newest:  # the publisher restarted
            self._waiting.clear()
            self._ask(publisher.SNAPSHOT_REQUEST)
        self._newest = number
        self._waiting.append((number, payload))
        if not self._asked:
            self._go_on()

    def ask_again(self) -> None:
        """Requests a snapshot again, because no reply arrived, or the connection was lost.

        The numbers of another publisher are no reason for a second request: its reply would mix with that of the first.
        """
        self.asks.clear()
        self._waiting.clear()
        self._newest = -1
        self._ask(publisher.SNAPSHOT_REQUEST)

    def answer(self, frames: list[bytes]) -> None:
        """Handles a message of the replay socket, without its empty delimiter."""
        match frames:
            case [publisher.STATUS, header]:
                status = msgspec.msgpack.decode(header)
                is_same = status["boot_id"] == self.boot_id
                if is_same and self.next is not None and status["oldest_sequence"] <= self.next <= status["sequence"]:
                    self._ask(self.next.to_bytes(8, "big"))
                else:
                    self._ask(publisher.SNAPSHOT_REQUEST)
            case [publisher.SNAPSHOT_BEGIN, header]:
                status = msgspec.msgpack.decode(header)
                self.known, self.next, self.boot_id = set(), status["sequence"], status["boot_id"]
            case [publisher.SNAPSHOT_BLOCKS, payload]:
                self._apply(payload)
            case [publisher.SNAPSHOT_END, b""]:
                self.num_snapshots += 1
                self._answered()
            case [*_, number, b""] if number == END:
                self.num_replays += 1
                self._answered()
            case [*_, number, payload]:
                if int.from_bytes(number, "big") == self.next:
                    self._apply(payload)
                    self.next += 1

    def _answered(self) -> None:
        self._asked = False
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self.next is not None:
            number, payload = self._waiting[0]
            if number > self.next:
                self._ask(publisher.STATUS_REQUEST)
                return
            self._waiting.popleft()
            if number == self.next:
                self._apply(payload)
                self.next += 1

    def _ask(self, request: bytes) -> None:
        self._asked = True
        self.asks.append(request)

    def _apply(self, payload: bytes) -> None:
        batch: list[Any] = msgspec.msgpack.decode(payload)
        for event in batch[1]:
            match event["type"]:
                case "BlockStored":
                    self.known.update((event["group_idx"], block_hash) for block_hash in event["block_hashes"])
                case "BlockRemoved":
                    self.known.difference_update((event["group_idx"], h) for h in event["block_hashes"])
                case _:
                    self.known.clear()
