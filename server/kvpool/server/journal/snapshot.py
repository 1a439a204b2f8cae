"""The state of a state's at one moment, as frames that are encoded and written one slice at a time.

1. `Frozen` takes the whole state at one moment. Small parts are encoded at once. Columns by block and requests are
   preserved until they are written (see `copy_on_write`). Later changes are not included.
2. Derived data is omitted and rebuilt: the maps by hash and by number.
3. Data that belongs to the process is omitted too: see `LEFT_OUT`.
"""

import gc
import operator
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import compress, islice
from typing import Any, Final, cast

from kvpool.core.blocks.block_pool import BlockContents, BlockPool
from kvpool.core.blocks.free_list import Chunk, FreeList
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.commands import CreatePool
from kvpool.core.ids import BlockHash, BlockId, PoolName
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, PoolConfig
from kvpool.core.state import State
from kvpool.server.journal.codec import Decoder, Encoder, dumps, loads, packed_bytes, unpacked_bytes
from kvpool.server.journal.copy_on_write import CopyOnWriteColumn, FrozenChunks, FrozenRequests
from kvpool.server.journal.frames import MALFORMED, DamageError, Frame, FrameKind, encode_frame
from kvpool.server.journal.records import WireCodec, hold_leases

LEFT_OUT: Final = {
    (State, "new_block_lifetimes"): "each process has its own",
    (KVCacheManager, "block_lifetimes"): "each process draws its own sample; no result depends on it",
    (BlockPool, "block_lifetimes"): "each process draws its own sample; no result depends on it",
    (BlockPool, "_events"): "unpublished events: watchers of a new process begin with a snapshot",
    (PrefixMap, "_by_hash"): "follows from _block_hashes, _group_ids and _duplicates",
    (Session, "by_number"): "follows from requests",
}
_COLUMNS: Final = {
    (FreeList, "_chunks"),
    (FreeList, "_column"),
    (PrefixMap, "_group_ids"),
    (PrefixMap, "_block_hashes"),
    (PrefixMap, "_session_numbers"),
    (BlockContents, "_contents"),
}
_COLUMN: Final = "column"
_CHUNKS: Final = "chunks"
_REQUESTS: Final = "requests"


@cache
def _state_fields() -> tuple[str, ...]:
    return tuple(sorted(vars(State()).keys() - {name for kind, name in LEFT_OUT if kind is State}))


@cache
def _fields_here() -> dict[str, tuple[str, ...]]:
    """Fields of the classes without slots, taken from the objects of a new pool."""
    group = KVCacheGroup(FullAttentionSpec(1), ("layer",))
    state = State()
    state.execute(CreatePool(PoolConfig(PoolName("m"), 2, 1, (group,), hash_scheme=HashScheme()), b"n" * 32), 0.0)
    encoder = Encoder(_NoMessages(), field=_small)
    encoder.node([getattr(state, name) for name in _state_fields()])
    return dict(encoder.classes)


class _NoMessages:
    def encode(self, _: object) -> None:
        return None

    def decode(self, kind: int, encoded: bytes) -> object:
        raise NotImplementedError


def _small(owner: object, name: str) -> object:
    here = (type(owner), name)
    return None if here in LEFT_OUT or here in _COLUMNS else getattr(owner, name)


class Frozen(AbstractContextManager["Frozen"]):
    """The state of a state's at one moment. Changes of the state cost more until this context ends.

    At most one may exist per state at a time.
    """

    def __init__(self, state: State, messages: WireCodec) -> None:
        self._messages = messages
        self._columns: list[CopyOnWriteColumn | FrozenChunks] = []
        self._requests = FrozenRequests()
        encoder = Encoder(messages, field=self._field)
        had_collector = gc.isenabled()
        gc.disable()
        try:
            node = encoder.node([getattr(state, name) for name in _state_fields()])
        except BaseException:
            self._give_back()
            raise
        finally:
            if had_collector:
                gc.enable()
        self._graph = [list(_state_fields()), encoder.classes, node]

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _field(self, owner: object, name: str) -> object:
        here = (type(owner), name)
        if here in LEFT_OUT:
            return None
        value = getattr(owner, name)
        if here == (FreeList, "_chunks"):
            chunks = FrozenChunks(value)
            self._columns.append(chunks)
            return ((_CHUNKS, len(self._columns) - 1, len(chunks)), chunks.heads)
        if here in _COLUMNS:
            if isinstance(value, CopyOnWriteColumn):
                raise RuntimeError("the state is already frozen")
            self._columns.append(CopyOnWriteColumn(owner, name))
            return (_COLUMN, len(self._columns) - 1, len(value))
        if here == (Session, "requests"):
            return (_REQUESTS, *self._requests.add(value.values()))
        return value

    def frames(self) -> Iterator[bytes]:
        """Yields the frames of the snapshot; call once. O(blocks of a slice) per frame after the first."""
        yield encode_frame(FrameKind.GRAPH, dumps(self._graph))
        for requests in self._requests.slices():
            encoder = Encoder(self._messages)
            node = encoder.node(requests)
            yield encode_frame(FrameKind.REQUESTS, dumps([encoder.classes, node]))
        for number, column in enumerate(self._columns):
            for piece in column.slices():
                yield encode_frame(FrameKind.SLICE, dumps([number, *_encode_slice(piece)]))
        yield encode_frame(FrameKind.END, b"")

    def _give_back(self) -> None:
        for column in self._columns:
            column.give_back()


def _encode_slice(values: Sequence[Any]) -> list[object]:
    if isinstance(values, bytearray):
        return ["y", bytes(values)]
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return ["I", array("I", values).tobytes()]
        except OverflowError:
            return ["q", array("q", values).tobytes()]
    if kinds <= {bytes, type(None)}:
        is_there = bytes(map(operator.is_not, values, [None] * len(values)))
        return ["b", is_there, *packed_bytes(list(compress(values, is_there)))]
    return ["t", *values]


def _decode_slice(kind: str, *parts: Any) -> list[Any]:  # noqa: ANN401 - depends on the kind
    if kind == "y":
        return list(parts[0])
    if kind in {"I", "q"}:
        return array(kind, parts[0]).tolist()
    if kind == "b":
        is_there, lengths, joined = parts
        values: list[bytes | None] = [None] * len(is_there)
        there = compress(range(len(is_there)), is_there)
        for i, value in zip(there, unpacked_bytes(lengths, joined), strict=True):
            values[i] = value
        return values
    return [value if value is None else tuple(value) for value in parts]


class Loader:
    """Restores a state from the frames of a snapshot, passed in order.

    Args:
        state: A new state, filled when the last frame is passed.
        messages: Decodes the messages in the snapshot.
    """

    def __init__(self, state: State, messages: WireCodec) -> None:
        self._state = state
        self._messages = messages
        self._graph: list[Any] = []
        self._columns: dict[int, list[Any]] = {}
        self._requests: list[Request] = []
        self.is_whole = False

    def take(self, frame: Frame) -> None:
        """Loads the next frame.

        Raises:
            DamageError: The frame does not belong to a snapshot, or to one of another version.
        """
        try:
            self._take(frame)
        except MALFORMED as error:
            raise DamageError(f"a malformed {frame.kind.name} frame in a snapshot") from error

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.GRAPH:
                self._graph = loads(frame.payload)
            case FrameKind.SLICE:
                number, *parts = loads(frame.payload)
                self._columns.setdefault(number, []).extend(_decode_slice(*parts))
            case FrameKind.REQUESTS:
                classes, node = loads(frame.payload)
                self._requests += Decoder(self._messages, classes).value(node)
            case FrameKind.END:
                self._fill()
                self.is_whole = True
            case _:
                raise DamageError("not a frame of a snapshot")

    def _fill(self) -> None:
        names, classes, node = self._graph
        if tuple(names) != _state_fields():
            raise DamageError("state.State differs in this version")
        decoder = Decoder(self._messages, classes, fields=_fields_here().get)
        values = decoder.value(node)
        for name, value in zip(names, values, strict=True):
            setattr(self._state, name, value)
        for session in decoder.decoded(Session):
            self._complete_session(session)
        for pool in self._state.pools():
            pool.block_lifetimes = pool.blocks.block_lifetimes = self._state.new_block_lifetimes()
            _complete(pool.blocks, self._column)
        hold_leases(self._state)

    def _complete_session(self, session: Session) -> None:
        kind, first, end = _place(session.requests)
        requests = self._requests[first:end]
        if kind != _REQUESTS or len(requests) != end - first or {*map(type, requests)} - {Request}:
            raise DamageError("requests are missing")
        session.requests = {request.request_id: request for request in requests}
        session.by_number = {request.number: request for request in requests}
        for request in requests:
            request.holding = session.holding

    def _column(self, place: object, wanted: str = _COLUMN) -> list[Any]:
        kind, number, length = _place(place)
        column = self._columns.pop(number, [])
        if kind != wanted or len(column) != length:
            raise DamageError("a column is missing or too short")
        return column


def _place(value: object) -> tuple[str, int, int]:
    match value:
        case (str(kind), int(first), int(second)):
            return kind, first, second
    return "", 0, 0


def _complete(blocks: BlockPool, column_at: Callable[..., list[Any]]) -> None:
    """Restores the columns, and rebuilds the data derived from them. O(num_blocks)."""
    blocks._events = []
    blocks.free_list._column = column_at(blocks.free_list._column)
    ids = [BlockId(i) for i in range(blocks.num_blocks)]
    _restore_free_list(blocks.free_list, column_at, ids)
    _restore_prefixes(blocks.prefix_map, column_at, ids)
    if blocks.contents:
        blocks.contents._contents = column_at(blocks.contents._contents)


def _restore_free_list(free_list: FreeList, column_at: Callable[..., list[Any]], ids: Sequence[BlockId]) -> None:
    place, heads = cast("tuple[object, list[tuple[int, int]]]", free_list._chunks)
    entries = iter(column_at(place, _CHUNKS))
    column = free_list._column
    free_list._chunks = OrderedDict()
    for number, length in heads:
        chunk = Chunk([ids[i] for i in islice(entries, length) if column[i] == -number])
        if chunk.num_free:
            free_list._chunks[number] = chunk
    if sum(chunk.num_free for chunk in free_list._chunks.values()) != len(free_list):
        raise DamageError("blocks of the free list are missing")


def _restore_prefixes(prefix_map: PrefixMap, column_at: Callable[[object], list[Any]], ids: Sequence[BlockId]) -> None:
    hashes: list[BlockHash | None] = column_at(prefix_map._block_hashes)
    prefix_map._block_hashes = hashes
    prefix_map._group_ids = bytearray(column_at(prefix_map._group_ids))
    prefix_map._session_numbers = column_at(prefix_map._session_numbers)
    duplicates = prefix_map._duplicates
    by_hash: list[dict[BlockHash, BlockId]] = [{} for _ in duplicates]
    for block_id, block_hash, group_id in zip(ids, hashes, prefix_map._group_ids, strict=True):
        if block_hash is not None:
            by_hash[group_id][block_hash] = block_id
    for mapped, by_copies in zip(by_hash, duplicates, strict=True):
        mapped.update((block_hash, next(iter(copies))) for block_hash, copies in by_copies.items())
    prefix_map._by_hash = by_hash
