"""Settings of an engine, from `additional_config` and the environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from kvpool.wire.channels import ACCESS_VARIABLES
from kvpool.wire.secret_file import read_secret

KEY: Final = "kvpool"
"""Key of the settings in `additional_config`."""
_ACCEPTED: Final[dict[type, tuple[type, ...]]] = {str: (str,), int: (int,), float: (int, float)}
_FROM_ENVIRONMENT: Final = {
    "address": "KVPOOL_ADDRESS",
    "pool": "KVPOOL_POOL",
    "memory": "KVPOOL_MEMORY",
    "weights_version": "KVPOOL_WEIGHTS_VERSION",
    "untested_version": "KVPOOL_UNTESTED_VERSION",
}
_MAX_DERIVED_POOL_CHARACTERS: Final = 100
"""Leaves room for what `of_replica` appends; a name has at most 128."""
_HUB_CACHE: Final = re.compile(r"models--(?P<name>[^/]+)/snapshots/[^/]+/?$")
"""Folder of a model in the cache of Hugging Face, which vLLM puts in place of the model's name when it is offline."""
_RANK: Final = "{rank}"
_REPLICA: Final = "{dp}"
_CREDENTIAL_FILE: Final = "KVPOOL_MEMORY_TOKEN_FILE"
VARIABLES: Final = (*_FROM_ENVIRONMENT.values(), _CREDENTIAL_FILE, "KVPOOL_VLLM_PLUGIN", *ACCESS_VARIABLES)
"""All that an engine reads."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine's session. Credentials come from the environment: see `connect`.

    Attributes:
        address: `host:port` or `unix:/path`, or those of a primary and its standbys, separated by commas; default:
            KVPOOL_ADDRESS.
        pool: Name of the pool; default: KVPOOL_POOL, or the model's name, see `pool_of_model`. With data parallelism
            each engine has its own memory and its own pool: see `of_replica`.
        client_name: Name of the engine, for display.
        lease_seconds: Time for which the blocks of a dead engine are kept; 0 for the server's default.
        memory_id: Identifies the memory that holds the engine's blocks. Engines with the same memory share a pool by
            giving the same id. By default the memory is private to the engine and ends with it.
        min_blocks: Number of blocks guaranteed to the engine.
        max_blocks: Maximum number of blocks that the engine may hold; 0 for the server's limit.
        reserve_tokens: Number of tokens for which running requests hold slots beyond those that they need, while enough
            blocks are free, so that their decodes do not wait for the service. 0: blocks are taken in the order in
            which vLLM takes them. -1: a block of each group. None with drafts or KV connectors.
        deadline_seconds: Maximum duration of a call, including retries. The engine waits this long for a service that
            restarts and, at its start, for the lease of the previous engine.
        memory: `unix:/path`, the socket of the `kvpool worker` that lends its memory to this engine; default:
            KVPOOL_MEMORY. `{rank}` is replaced with the number of the engine's worker, `{dp}` with the index of the
            engine among data-parallel ones. Empty: the engine has memory of its own.
        weights_version: Version of the weights that the engine loads when it starts, an opaque value of at most 256
            bytes; default: KVPOOL_WEIGHTS_VERSION or, in memory that engines share, what identifies the files that it
            loads. Engines hit only blocks that were computed with an equal version. It can be changed while the engine
            runs: see `AdminClient.set_weights_version`.
        background_copy_mib: Copies of a hit from host memory that have more MiB per rank are made while other requests
            run; others before the step.
        untested_version: Version of vLLM to run although it is not supported, such as "0.34.0"; default:
            KVPOOL_UNTESTED_VERSION. Its scheduler may differ in ways that give other results.
    """

    address: str
    pool: str
    client_name: str = ""
    lease_seconds: float = 0.0
    memory_id: str = ""
    min_blocks: int = 0
    max_blocks: int = 0
    reserve_tokens: int = -1
    deadline_seconds: float = 120.0
    memory: str = ""
    weights_version: str = ""
    background_copy_mib: int = 64
    untested_version: str = ""

    @classmethod
    def of_engine(cls, vllm_config: Any) -> "Settings":
        """Reads the settings of an engine, which may be one of several data-parallel ones. See `of`."""
        return cls.of_replica(vllm_config, vllm_config.parallel_config.data_parallel_index)

    @classmethod
    def of_replica(cls, vllm_config: Any, index: int) -> "Settings":
        """Reads the settings of the engine with an index among data-parallel ones, in any process. See `of`.

        ".dp" and its index are appended to the pool's name, unless all have one lender and so one memory. vLLM has
        engines of dense models run as if alone, and keeps their index only: the one of index 0 looks like an engine
        that is alone, and uses the name as it is.
        """
        model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
        settings = cls.of(vllm_config.additional_config, model_config.served_model_name or model_config.model)
        # The size is 1 in the process of a dense model's engine, and not in the process that starts it.
        is_alone = not index and (parallel_config.data_parallel_size == 1 or not model_config.is_moe)
        has_one_lender = bool(settings.memory) and _REPLICA not in settings.memory
        return replace(
            settings,
            pool=settings.pool if is_alone or has_one_lender else f"{settings.pool}.dp{index}",
            memory=settings.memory.replace(_REPLICA, str(index)),
        )

    @classmethod
    def of(cls, additional_config: object, model: str = "") -> "Settings":
        """Reads the settings. An engine without a pool's name uses that of its model, if the model is given.

        Raises:
            ValueError: A setting is missing, unknown or of another type; names it.
        """
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(_where() + f" must be an object, not {given!r}")  # noqa: TRY004 - a setting is wrong
        values: dict[str, Any] = {
            name: os.environ[variable] for name, variable in _FROM_ENVIRONMENT.items() if os.environ.get(variable)
        }
        values.update(given)
        kinds: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in kinds:
                raise ValueError(_where(name) + f" is not known; known: {', '.join(kinds)}")
            if isinstance(value, bool) or not isinstance(value, _ACCEPTED[kinds[name]]):
                raise ValueError(_where(name) + f" must be {kinds[name].__name__}, not {value!r}")  # noqa: TRY004 - a setting is wrong
        if model and not values.get("memory_id"):  # the same memory of another model must not be found by a default
            values["pool"] = values.get("pool") or pool_of_model(model)
        for name in ("address", "pool"):
            if not values.get(name):
                raise ValueError(f"kvpool needs {_where(name)}, or {_FROM_ENVIRONMENT[name]} in the environment")
        settings = cls(**values)
        if settings.memory and settings.memory_id:
            raise ValueError(_where("memory_id") + " must not be set with memory: the lender knows the memory")
        return settings

    @property
    def shares_memory(self) -> bool:
        """Whether other engines may use the memory, at the same time or later."""
        return bool(self.memory or self.memory_id)

    def memory_of(self, rank: int) -> str:
        """Returns the socket that lends memory to a worker of the engine."""
        return self.memory.replace(_RANK, str(rank))

    @staticmethod
    def memory_token() -> str:
        """Reads the lender's token from the file that KVPOOL_MEMORY_TOKEN_FILE names; empty for none.

        Raises:
            ValueError: The file cannot be read, or is empty.
        """
        path = os.environ.get(_CREDENTIAL_FILE)
        return read_secret(_CREDENTIAL_FILE, Path(path)) if path else ""


def pool_of_model(model: str) -> str:
    """Returns the pool that an engine uses by default: the model's name, for a folder its last part.

    Characters that names of pools do not have are replaced with "-".
    """
    if cached := _HUB_CACHE.search(model):
        model = cached["name"].replace("--", "/")
    elif Path(model).is_dir():
        model = Path(model).absolute().name
    return re.sub(r"[^A-Za-z0-9._/-]+", "-", model)[:_MAX_DERIVED_POOL_CHARACTERS]


def address_source(additional_config: object) -> str:
    """Returns where the server's address comes from, for a log or a message."""
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    is_given = isinstance(given, Mapping) and given.get("address")
    return "additional_config" if is_given else _FROM_ENVIRONMENT["address"]


def _where(name: str = "") -> str:
    return f"additional_config[{KEY!r}]" + (f"[{name!r}]" if name else "")
