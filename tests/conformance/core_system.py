"""The core as a system under test, called directly."""

from collections.abc import Sequence
from operator import attrgetter

from conformance.golden import Line, Stats
from kvpool.client.hashing import BlockHasher, ExtraKeys
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from kvpool.core.ids import BlockHash, BlockId, RequestId, RequestNumber, SessionId, SessionNumber, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import PoolConfig
from support.integrity import check_integrity


def hash_to_int(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def event_to_line(event: BlockEvent) -> Line:
    """Formats an event as in the golden files."""
    match event:
        case BlockStored():
            parent = event.parent_block_hash
            return {
                "type": "BlockStored",
                "block_hashes": [hash_to_int(h) for h in event.block_hashes],
                "parent_block_hash": None if parent is None else hash_to_int(parent),
                "token_ids": list(event.token_ids),
                "block_size": event.block_size,
                "lora_name": event.lora_name,
                "medium": "GPU",
                "group_idx": event.group_id,
                "lookahead_token_ids": event.lookahead_by_block,
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": [hash_to_int(event.block_hash)],
                "medium": "GPU",
                "group_idx": event.group_id,
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


class CoreSystem:
    """One pool with the requests of one session.

    Args:
        config: Configuration of the pool.
        integrity_interval: Number of answers between two checks of its integrity.
    """

    def __init__(self, config: PoolConfig, integrity_interval: int = 8) -> None:
        self._integrity_interval = integrity_interval
        self._answers = 0
        self.pool = KVCacheManager(config)
        self._hasher = BlockHasher(config.hash_scheme, config.hash_block_size)
        self._session = Session(SessionId("s"), SessionNumber(1), "", 10.0, 0.0)
        self.pool.sessions[self._session.session_number] = self._session
        self._step = StepNumber(0)
        self._tokens: dict[str, tuple[list[int], ExtraKeys]] = {}
        self._computed: dict[str, ComputedBlocks] = {}

    def _begin_step(self) -> None:
        """The copies of the step before have been made."""
        self.pool.release_copies(self._session, self._step)

    def _get(self, request_id: str) -> Request:
        return self._session.requests[RequestId(request_id)]

    def request(self, request_id: str, token_ids: list[int], keys: ExtraKeys) -> Sequence[BlockHash]:
        number = RequestNumber(len(self._tokens) + 1)
        self._tokens[request_id] = ([], keys)
        request = Request(RequestId(request_id), number, self._session.session_number, self.pool.new_tables())
        request.lora_name, request.num_prompt_tokens = keys.lora_name, len(token_ids)
        request.copies = self._session.copies
        self._session.add(request)
        return self.append(request_id, token_ids)

    def append(self, request_id: str, token_ids: list[int]) -> Sequence[BlockHash]:
        request = self._get(request_id)
        tokens, keys = self._tokens[request_id]
        tokens += token_ids
        before = len(request.hashes)
        request.num_tokens += len(token_ids)
        self._session.num_tokens += len(token_ids)
        request.token_ids += token_ids
        if self.pool.config.enable_caching:
            self._hasher.extend(request.hashes, tokens, keys)
        return request.hashes[before:]

    def get_computed_blocks(self, request_id: str, *, counted: bool) -> tuple[list[list[int]], int]:
        self._begin_step()
        lookup = self.pool.get_computed_blocks if counted else self.pool.find_longest_cache_hit
        computed = self._computed[request_id] = lookup(self._get(request_id))
        return [list(blocks) for blocks in computed.block_ids], computed.num_tokens

    def allocate_slots(self, line: Line) -> list[list[int]] | None:
        request = self._get(line["request_id"])
        request.num_computed_tokens = line["num_computed_tokens"]
        computed = self._computed.pop(request.request_id, None) if line["with_computed_blocks"] else None
        self._begin_step()
        self._step = StepNumber(self._step + 1)
        new = self.pool.allocate_slots(
            request,
            line["num_new_tokens"],
            line["num_lookahead_tokens"],
            computed,
            num_encoder_tokens=line["num_encoder_tokens"],
            delay_cache_blocks=line["delay_cache_blocks"],
            sequence=self._step,
        )
        return None if new is None else [list(blocks) for blocks in new]

    def copies(self) -> list[list[int]]:
        return [[each.source, each.target] for each in sorted(self._session.copies, key=attrgetter("group_id"))]

    def table(self, request_id: str) -> list[list[int]]:
        return [list(table.block_ids) for table in self._get(request_id).tables]

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        self.pool.cache_blocks(self._get(request_id), num_computed_tokens, sequence=self._step)

    def free(self, request_id: str) -> None:
        self._begin_step()
        request = self._get(request_id)
        self.pool.free(request)
        self._session.forget(request)

    def preempt(self, request_id: str) -> None:
        self._begin_step()
        self.pool.preempt(self._get(request_id))

    def common_prefix_blocks(self, request_id: str) -> list[int]:
        running = [request for request in self._session.requests.values() if request.holds_blocks]
        return list(self.pool.get_num_common_prefix_blocks(self._get(request_id), running))

    def evict(self, block_ids: list[int]) -> None:
        self.pool.blocks.evict_blocks(map(BlockId, block_ids))

    def reset(self) -> bool:
        self._begin_step()
        return self.pool.reset_prefix_cache()

    def stats(self) -> Stats:
        s = self.pool.stats
        return Stats(
            s.requests,
            s.queries_tokens,
            s.hits_tokens,
            s.preempted_requests,
            s.preempted_queries_tokens,
            s.preempted_hits_tokens,
            s.resets,
        )

    def free_blocks(self) -> int:
        self._answers += 1
        if self._answers % self._integrity_interval == 0:
            self.check()
        return self.pool.blocks.num_free_blocks

    def check(self) -> None:
        """Checks the integrity of the pool, as `free_blocks` does at intervals."""
        check_integrity(self.pool, [self._session])

    def usage(self) -> float:
        return self.pool.blocks.usage

    def events(self, count: int) -> list[Line]:
        del count
        return [event_to_line(event) for event in self.pool.blocks.take_events()]
