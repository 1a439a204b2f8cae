"""Settings of a server are accepted, or refused by name, as the transcripts show; values are JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.server.config import ServerConfig
from kvpool.server.limits.config import Limits
from kvpool.wire.channels import TlsConfig
from support.transcripts import check

SHARD: Final[dict[str, Any]] = {"url": "etcd://h:1/c", "replication_listen": "127.0.0.1:0"}


def shard(**values: Any) -> str:
    config = ClusterConfig(**{**SHARD, **values})
    return " ".join(
        [*(f"{name}={getattr(config, name)}" for name in values), f"wants {config.wanted_standbys} standbys"]
    )


def etcd(url: str, tls: str = "", user: str = "", password_file: str = "") -> str:
    password = Path(password_file) if password_file else None
    config = EtcdConfig.parse(url, TlsConfig(Path(tls)) if tls else None, user, password)
    return f"{config.endpoints} at {config.key!r}, user {config.user!r}, {config.tls}"


KINDS: Final[dict[str, Callable[..., object]]] = {
    "alone": lambda **values: bool(ClusterConfig(**values).url),
    "shard": shard,
    "etcd": etcd,
    "limits": Limits,
    "server": lambda **values: ServerConfig(limits=Limits(**values)).limits.max_waiting_bytes,
}


def execute(kind: str, *words: str) -> list[str]:
    values = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    try:
        return [f"accepted: {KINDS[kind](**{**values, **lists})}"]
    except ValueError as error:
        return [f"refused: {error}"]


@pytest.mark.parametrize("path", sorted(Path(__file__).with_name("settings").glob("*.txt")), ids=lambda path: path.stem)
def test_settings_are_accepted_or_refused_as_the_transcript_shows(path: Path) -> None:
    check(path, execute)
