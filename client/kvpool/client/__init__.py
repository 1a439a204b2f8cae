"""What a scheduler imports: sessions, requests, block hashes.

`connect` for synchronous schedulers, `kvpool.client.aio.connect` for asyncio. The same API drives a server over gRPC
and, with the address "embedded:", the core in the caller's own process.
"""

from kvpool.client._version import __version__
from kvpool.client.connection import Client, connect
from kvpool.client.errors import (
    AbortedError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.client.hashing import BlockHasher, ExtraKeys, MultiModalItem, register_hash
from kvpool.client.prefix_index import PrefixIndex
from kvpool.client.request import Request
from kvpool.client.results import Admission, Allocation, Answer, Decodes, HitChanged
from kvpool.client.session import Session
from kvpool.client.step_builder import StepBuilder
from kvpool.client.transport import EventBatch, HeldRequest, WatchKind
from kvpool.server.access import TlsConfig
from kvpool.server.core.config import HashScheme, KeyForm, KVCacheGroup, PoolConfig, ReuseOrder
from kvpool.server.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvpool.server.core.pool import ComputedBlocks
from kvpool.server.core.pool_info import PoolInfo
from kvpool.server.core.spec_base import KVCacheSpec
from kvpool.server.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.server.core.step import Outcome
from kvpool.server.core.world import PoolState, RankInfo, RankState

__all__ = [
    "AbortedError",
    "Admission",
    "AllBlocksCleared",
    "Allocation",
    "Answer",
    "BlockHasher",
    "BlockRemoved",
    "BlockStored",
    "ChunkedLocalAttentionSpec",
    "Client",
    "ComputedBlocks",
    "CrossAttentionSpec",
    "DeadlineError",
    "Decodes",
    "DeniedError",
    "EventBatch",
    "ExhaustedError",
    "ExtraKeys",
    "FullAttentionSpec",
    "HashScheme",
    "HeldRequest",
    "HitChanged",
    "InvalidArgumentError",
    "KVCacheGroup",
    "KVCacheSpec",
    "KeyForm",
    "KvpoolError",
    "MLAAttentionSpec",
    "MambaSpec",
    "MultiModalItem",
    "NotFoundError",
    "Outcome",
    "PoolConfig",
    "PoolInfo",
    "PoolState",
    "PrefixIndex",
    "RankInfo",
    "RankState",
    "Request",
    "ReuseOrder",
    "ServerError",
    "Session",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "StepBuilder",
    "TlsConfig",
    "UnauthenticatedError",
    "UnavailableError",
    "UniformTypeKVCacheSpecs",
    "WatchKind",
    "WrongStateError",
    "__version__",
    "connect",
    "register_hash",
]
