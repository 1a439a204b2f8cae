"""The client of a scheduler: sessions, requests and block hashes.

`connect` for synchronous schedulers, `kvpool.client.aio.connect` for asyncio. The same API drives a server over gRPC
and, with the address "embedded:", the core in the caller's own process.
"""

from kvpool.client._version import __version__
from kvpool.client.connection import Client, connect
from kvpool.client.hashing import BlockHasher, ExtraKeys, MultiModalItem, register_hash
from kvpool.client.prefix_index import PrefixIndex
from kvpool.client.request import Request
from kvpool.client.results import Admission, Allocation, Answer, Decodes, HitChanged
from kvpool.client.session import Session
from kvpool.client.step_builder import StepBuilder
from kvpool.client.transports.transport import EventBatch, WatchKind
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import (
    AbortedError,
    DeniedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from kvpool.core.ids import PoolName
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.pool_config import HashScheme, KeyForm, KVCacheGroup, PoolConfig, ReuseOrder
from kvpool.core.steps.columns import Outcome
from kvpool.v1.pool_pb2 import PoolInfo, PoolState, RankInfo, RankState
from kvpool.wire.channels import TlsConfig
from kvpool.wire.errors import DeadlineError, ServerError

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
    "CircularBufferSpec",
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
    "HitChanged",
    "InvalidArgumentError",
    "KVCacheGroup",
    "KVCacheSpec",
    "KeyForm",
    "KvpoolError",
    "MLAAttentionSpec",
    "MambaSpec",
    "Medium",
    "MultiModalItem",
    "NotFoundError",
    "Outcome",
    "PoolConfig",
    "PoolInfo",
    "PoolName",
    "PoolState",
    "PrefixIndex",
    "RankInfo",
    "RankState",
    "Request",
    "ReuseOrder",
    "ServerError",
    "Session",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
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

for _value in tuple(globals().values()):
    if isinstance(_value, type) and issubclass(_value, KvpoolError):
        _value.__module__ = __name__  # tracebacks show the name that users import
