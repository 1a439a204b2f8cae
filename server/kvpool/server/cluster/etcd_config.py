"""Where the directory is in etcd, and how to reach it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvpool.server.cluster.directory import NAME
from kvpool.wire.address import host_and_port, is_loopback
from kvpool.wire.channels import TlsConfig

_URL: Final = re.compile(r"(?P<scheme>etcds?)://(?P<endpoints>[^/?#@]+)/(?P<shard>[^/?#]*)")


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """How to reach the directory in etcd.

    Attributes:
        endpoints: Addresses of etcd's members, `host:port`.
        shard: Name of the shard. Shards in one etcd do not see each other.
        tls: TLS settings; None for plaintext.
        user: User of etcd; empty if etcd has no authentication.
        password_file: File with the user's password. It is read again for each authentication.
    """

    endpoints: tuple[str, ...]
    shard: str
    tls: TlsConfig | None = None
    user: str = ""
    password_file: Path | None = None

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("cluster: at least one endpoint of etcd is needed")
        for endpoint in self.endpoints:
            host_and_port("cluster", endpoint)
        if len(set(self.endpoints)) != len(self.endpoints):
            raise ValueError("cluster: an endpoint of etcd appears twice")
        if not NAME.fullmatch(self.shard):
            raise ValueError(f"cluster: name {self.shard!r}: needs 1 to 64 letters, digits, '.', '_' or '-'")
        if bool(self.user) != (self.password_file is not None):
            raise ValueError("cluster: a user of etcd and a password file each require the other")
        if self.user and not self.tls and not all(map(is_loopback, self.endpoints)):
            raise ValueError("cluster: a user of etcd needs TLS (etcds://); others could read the password")

    @classmethod
    def parse(cls, url: str, tls: TlsConfig | None = None, user: str = "", password_file: Path | None = None) -> Self:
        """Makes a configuration from a URL.

        Args:
            url: `etcd://host1:2379,host2:2379/SHARD`, or `etcds://` for TLS.
            tls: TLS settings. They turn TLS on, with either scheme.
            user: See `EtcdConfig`.
            password_file: See `EtcdConfig`.

        Raises:
            ValueError: The URL or a setting is invalid; the message begins with `cluster`.
        """
        if "@" in url:  # not quoted: it may contain a password
            raise ValueError("cluster: the URL must not have a user; set etcd_user and etcd_password_file")
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError(f"cluster: {url!r}: needs etcd://HOST:PORT[,HOST:PORT...]/SHARD, or etcds:// for TLS")
        if tls is None and found["scheme"] == "etcds":
            tls = TlsConfig()
        return cls(tuple(found["endpoints"].split(",")), found["shard"], tls, user, password_file)

    @property
    def key(self) -> bytes:
        """The key of the shard's record."""
        return f"/kvpool/{self.shard}".encode()
