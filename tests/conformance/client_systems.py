"""The service under test, through sessions of the client and through unary calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import grpc

from conformance.core_system import event_to_line
from conformance.golden import Line, Stats
from kvpool.client import (
    BlockHasher,
    Client,
    ComputedBlocks,
    EventBatch,
    ExtraKeys,
    HitChanged,
    PoolConfig,
    PoolInfo,
    Request,
    Session,
)
from kvpool.client.transports import messages
from kvpool.client.transports.transport import SessionOptions
from kvpool.core.ids import NULL_BLOCK, BlockHash, GroupId, RequestId, RequestNumber
from kvpool.core.steps.columns import Operation
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, step_pb2


class WatchedSystem(ABC):
    """Reads the state of a pool with GetPool, once per line of a schedule, and its events with Watch."""

    def __init__(self) -> None:
        self._info: PoolInfo | None = None
        self._batches: Iterator[EventBatch] = iter(())
        self._seen_batches = 0
        self._requests: dict[str, Request] = {}

    @abstractmethod
    def info(self) -> PoolInfo: ...

    @abstractmethod
    def watch(self, from_sequence: int) -> Iterator[EventBatch]: ...

    def append(self, request_id: str, token_ids: list[int]) -> Sequence[BlockHash]:
        request = self._requests[request_id]
        before = len(request.hashes)
        request.append(token_ids)
        return request.hashes[before:]

    def stats(self) -> Stats:
        s = self.info().prefix_cache
        normal = (s.requests, s.queries_tokens, s.hits_tokens)
        return Stats(*normal, s.preempted_requests, s.preempted_queries_tokens, s.preempted_hits_tokens, s.resets)

    def free_blocks(self) -> int:
        self._info = self.info()
        return self._info.free_blocks

    def usage(self) -> float:
        assert self._info is not None
        return self._info.usage

    def events(self, count: int) -> list[Line]:
        """Reads all batches up to the pool's newest, whose number GetPool returns."""
        del count
        assert self._info is not None
        lines = []
        while self._seen_batches < self._info.event_sequence:
            batch = next(self._batches, None)
            if batch is None:  # not started yet, or embedded: there a watch ends after the newest batch
                self._batches = self.watch(self._seen_batches + 1)
                continue
            self._seen_batches += 1
            assert batch.sequence == self._seen_batches
            lines += [event_to_line(event) for event in batch.events]
        return lines


class ClientSystem(WatchedSystem):
    """A session of a client, with any transport."""

    def __init__(self, client: Client, config: PoolConfig) -> None:
        super().__init__()
        self._client = client
        self._name = config.name
        client.create_pool(config)
        self._computed: dict[str, ComputedBlocks] = {}
        self._session: Session = client.open_session(config.name)

    def info(self) -> PoolInfo:
        return self._client.get_pool(self._name)

    def watch(self, from_sequence: int) -> Iterator[EventBatch]:
        return self._client.watch(self._name, from_sequence=from_sequence)

    def request(self, request_id: str, token_ids: list[int], keys: ExtraKeys) -> Sequence[BlockHash]:
        request = self._requests[request_id] = self._session.request(request_id, token_ids, extra_keys=keys)
        return request.hashes

    def get_computed_blocks(self, request_id: str, *, counted: bool) -> tuple[list[list[int]], int]:
        builder, request = self._session.new_step(), self._requests[request_id]
        answer = builder.get_computed_blocks(request, counted=False)
        if counted:  # now, as vLLM 0.14.1 counts
            builder.step.operations[-1] = Operation.LOOKUP_COUNTED_AT_ONCE
        self._session.send(builder)
        computed = self._computed[request_id] = answer.computed
        return [list(blocks) for blocks in computed.block_ids], computed.num_tokens

    def allocate_slots(self, line: Line) -> list[list[int]] | None:
        request_id = line["request_id"]
        answer = self._session.allocate_slots(
            self._requests[request_id],
            line["num_new_tokens"],
            computed=self._computed.pop(request_id, None) if line["with_computed_blocks"] else None,
            num_computed_tokens=line["num_computed_tokens"],
            num_lookahead_tokens=line["num_lookahead_tokens"],
            num_encoder_tokens=line["num_encoder_tokens"],
            delay_cache_blocks=line["delay_cache_blocks"],
        )
        assert not isinstance(answer, HitChanged)
        return None if answer is None else answer.new_blocks

    def table(self, request_id: str) -> list[list[int]]:
        return self._requests[request_id].block_ids

    def copies(self) -> list[list[int]]:
        return [[each.source, each.target] for each in sorted(self._session.take_copies(), key=attrgetter("group_id"))]

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        self._session.cache_blocks(self._requests[request_id], num_computed_tokens)

    def free(self, request_id: str) -> None:
        self._session.free(self._requests.pop(request_id))

    def preempt(self, request_id: str) -> None:
        self._session.preempt(self._requests[request_id])

    def common_prefix_blocks(self, request_id: str) -> list[int]:
        return self._session.get_common_prefix_blocks(self._requests[request_id])

    def evict(self, block_ids: list[int]) -> None:
        self._session.evict_blocks(block_ids)

    def reset(self) -> bool:
        return self._session.reset_prefix_cache()

    def close(self) -> None:
        close = getattr(self._batches, "close", None)
        if close:
            close()
        self._session.close()


class UnarySystem(WatchedSystem):
    """The unary calls, as a client in another language makes them. Each change is sent twice and applied once."""

    def __init__(self, channel: grpc.Channel, config: PoolConfig) -> None:
        super().__init__()
        self._stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        self._event_stub = event_pb2_grpc.EventServiceStub(channel)
        self._config = config
        self._hasher = BlockHasher(config.hash_scheme, config.hash_block_size) if config.enable_caching else None
        self._computed: dict[str, allocator_pb2.ComputedBlocks] = {}
        self._sequence = 0
        self._copies: list[tuple[int, int, int]] = []
        self._stub.CreatePool(messages.create_pool_request(config))
        opened = self._stub.OpenSession(messages.open_session_request(SessionOptions(config.name)))
        self._session_id = opened.session.session_id

    def info(self) -> PoolInfo:
        return self._stub.GetPool(allocator_pb2.GetPoolRequest(pool_name=self._config.name)).pool

    def watch(self, from_sequence: int) -> Iterator[EventBatch]:
        request = event_pb2.WatchRequest(pool_name=self._config.name, from_sequence=from_sequence)
        call = self._event_stub.Watch(request)
        assert next(call).sequence == from_sequence - 1
        return map(messages.read_batch, call)

    def _send_twice(self, method: Callable[[Any], Any], kind: Callable[..., Any], **fields: Any) -> Any:
        self._sequence += 1
        message = kind(session_id=self._session_id, sequence=self._sequence, **fields)
        answer = method(message)
        assert method(message) == answer
        return answer

    def _update(self, request_id: str) -> allocator_pb2.RequestUpdate:
        request = self._requests[request_id]
        update = allocator_pb2.RequestUpdate(
            request_id=request_id,
            num_appended_tokens=request.num_tokens - request.num_sent_tokens,
            block_hashes=b"".join(request.hashes[self._config.num_hashes(request.num_sent_tokens) :]),
            token_ids=request.token_ids[request.num_sent_tokens :] if self._config.makes_events else [],
            lora_name=request.extra_keys.lora_name or "",
        )
        request.num_sent_tokens = request.num_tokens
        return update

    def request(self, request_id: str, token_ids: list[int], keys: ExtraKeys) -> Sequence[BlockHash]:
        groups = len(self._config.groups)
        request = Request(RequestId(request_id), RequestNumber(0), list(token_ids), groups, self._hasher, keys)
        self._requests[request_id] = request
        return request.hashes

    def get_computed_blocks(self, request_id: str, *, counted: bool) -> tuple[list[list[int]], int]:
        computed = self._send_twice(
            self._stub.GetComputedBlocks,
            allocator_pb2.GetComputedBlocksRequest,
            request=self._update(request_id),
            uncounted=not counted,
            counted_at_once=counted,
        ).computed
        self._computed[request_id] = computed
        return [list(group.block_ids) for group in computed.groups], computed.num_tokens

    def allocate_slots(self, line: Line) -> list[list[int]] | None:
        request = self._requests[line["request_id"]]
        computed = self._computed.pop(line["request_id"], None) if line["with_computed_blocks"] else None
        answer = self._send_twice(
            self._stub.AllocateSlots,
            allocator_pb2.AllocateSlotsRequest,
            request=self._update(line["request_id"]),
            num_new_tokens=line["num_new_tokens"],
            computed=computed,
            num_rejected_tokens=request.num_computed_tokens - line["num_computed_tokens"],
            num_lookahead_tokens=line["num_lookahead_tokens"],
            num_encoder_tokens=line["num_encoder_tokens"],
            delay_cache_blocks=line["delay_cache_blocks"],
        )
        request.num_computed_tokens = line["num_computed_tokens"]
        for i, group in enumerate(self._config.groups):  # as the proto documents for OPERATION_ALLOCATE
            skipped = group.spec.num_skipped_tokens(request.num_computed_tokens) // self._config.span_tokens(GroupId(i))
            table = request.block_ids[i]
            table[:skipped] = [NULL_BLOCK] * len(table[:skipped])
        self._copies = []
        if answer.outcome == step_pb2.OUTCOME_NO_BLOCKS:
            return None
        assert answer.outcome == step_pb2.OUTCOME_UNSPECIFIED
        num_new_tokens = line["num_new_computed_tokens"] + line["num_new_tokens"]
        request.num_computed_tokens += num_new_tokens
        hit = [list(group.block_ids) for group in computed.groups] if computed else [[] for _ in request.block_ids]
        new = [list(group.block_ids) for group in answer.new_blocks]
        copied = iter(answer.copied_block_ids)
        self._copies = sorted(zip(copied, copied, copied, strict=True))
        targets = [target for _, _, target in self._copies]
        for table, hit_ids, new_ids in zip(request.block_ids, hit, new, strict=True):
            if hit_ids and new_ids and new_ids[0] in targets:  # which replaces the block within which the hit ends
                hit_ids.pop()
            table[:] = [NULL_BLOCK if block_id in new_ids else block_id for block_id in table]
            table.extend(hit_ids + new_ids)
        return new

    def table(self, request_id: str) -> list[list[int]]:
        return self._requests[request_id].block_ids

    def copies(self) -> list[list[int]]:
        return [[source, target] for _, source, target in self._copies]

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        self._send_twice(
            self._stub.CacheBlocks,
            allocator_pb2.CacheBlocksRequest,
            request=self._update(request_id),
            num_computed_tokens=num_computed_tokens,
        )

    def free(self, request_id: str) -> None:
        self._send_twice(self._stub.Free, allocator_pb2.FreeRequest, request=self._update(request_id))
        del self._requests[request_id]

    def preempt(self, request_id: str) -> None:
        update = self._update(request_id)
        self._send_twice(self._stub.Free, allocator_pb2.FreeRequest, request=update, preempted=True)
        self._requests[request_id].forget_blocks()

    def common_prefix_blocks(self, request_id: str) -> list[int]:
        answer = self._send_twice(
            self._stub.GetCommonPrefixBlocks,
            allocator_pb2.GetCommonPrefixBlocksRequest,
            request=self._update(request_id),
        )
        return list(answer.num_blocks)

    def evict(self, block_ids: list[int]) -> None:
        self._send_twice(self._stub.EvictBlocks, allocator_pb2.EvictBlocksRequest, block_ids=block_ids)

    def reset(self) -> bool:
        answer = self._send_twice(self._stub.ResetPrefixCache, allocator_pb2.ResetPrefixCacheRequest)
        return bool(answer.reset)
