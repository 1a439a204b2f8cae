"""Configuration of a server that shares its shard with standbys."""

from dataclasses import dataclass
from pathlib import Path

from kvpool.core.errors import check_setting
from kvpool.server.cluster.directory import MAX_MEMBERS
from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.wire.address import host_and_port
from kvpool.wire.channels import TlsConfig


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Settings of a server of a shard. All servers of a shard have the same, except for their addresses.

    Attributes:
        url: The directory, `etcd://HOST:PORT,HOST:PORT/SHARD`; empty: the server is alone and needs no directory.
        etcd_user: User of etcd; empty if etcd has no authentication.
        etcd_password_file: File with the user's password.
        etcd_tls_ca: PEM file of the authorities for etcd's certificates; None for gRPC's default roots.
        etcd_tls_cert: PEM file of this server's certificate for etcd, if etcd requires one.
        etcd_tls_key: Its private key.
        standbys: Number of standbys that a shard should have; fewer are reported.
        replication_listen: Address at which standbys connect, `host:port`.
        claim_term: Term that this server begins when it starts, whatever the directory holds, unless a server has seen
            it: the way out when the directory or all other servers are lost. 0 for none. It names a term so that terms
            never go back, which clients would ignore, and so that a unit file that keeps it claims nothing later.
        advertise: Addresses at which clients reach this server, `host:port`; empty: those that it listens on.
        replication_advertise: Address at which standbys reach it; empty: the one that it listens on.
        replication_token_file: File with the token that a standby sends; None for none.
        replication_tls_ca: PEM file of the authorities for the certificates of the servers; None: plaintext.
        min_in_sync: Number of in-sync servers, the primary included, below which the primary confirms nothing. It
            still executes changes.
        takeover_seconds: Time without a message after which a standby to which the primary sends records takes over;
            `replica.STALL_SECONDS` before it does.
        standby_timeout_seconds: Time for which records and marks wait for a standby, at once or in parts, before the
            primary continues without it.
        confirm_seconds: Maximum time for which an answer waits for the standbys.
        replication_log_bytes: Size of the records that are kept for standbys that resume or load a snapshot.
    """

    url: str = ""
    etcd_user: str = ""
    etcd_password_file: Path | None = None
    etcd_tls_ca: Path | None = None
    etcd_tls_cert: Path | None = None
    etcd_tls_key: Path | None = None
    standbys: int = 1
    claim_term: int = 0
    replication_listen: str = ""
    advertise: tuple[str, ...] = ()
    replication_advertise: str = ""
    replication_token_file: Path | None = None
    replication_tls_ca: Path | None = None
    min_in_sync: int = 1
    takeover_seconds: float = 0.5
    standby_timeout_seconds: float = 1.0
    confirm_seconds: float = 5.0
    replication_log_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not self.url:
            return
        _ = self.etcd
        if not self.replication_listen:
            raise ValueError("replication_listen: a server of a cluster needs an address for its standbys")
        host_and_port("replication_listen", self.replication_listen)
        for name, addresses in (
            ("advertise", self.advertise),
            ("replication_advertise", (self.replication_advertise,) if self.replication_advertise else ()),
        ):
            for address in addresses:
                host_and_port(name, address)
        for name, low, high in (
            ("claim_term", 0, 2**31),
            ("standbys", 1, MAX_MEMBERS - 1),
            ("min_in_sync", 1, MAX_MEMBERS),
            ("takeover_seconds", 0.1, 60),
            ("standby_timeout_seconds", 0.1, 60),
            ("confirm_seconds", 0.1, 60),
            ("replication_log_bytes", 2**20, 2**34),
        ):
            check_setting(name, getattr(self, name), low, high)

    @property
    def wanted_standbys(self) -> int:
        """Number of standbys that a shard should have: at least those without which its primary confirms nothing."""
        return max(self.standbys, self.min_in_sync - 1)

    def replication_token(self) -> str:
        """The token that this server sends to a primary; empty for none. Raises OSError if it cannot be read."""
        path = self.replication_token_file
        return path.read_text().strip() if path else ""

    @property
    def etcd(self) -> EtcdConfig:
        """How to reach the directory.

        Raises:
            ValueError: A setting is invalid.
        """
        files = self.etcd_tls_ca, self.etcd_tls_cert, self.etcd_tls_key
        tls = TlsConfig(*files) if any(files) else None
        return EtcdConfig.parse(self.url, tls, self.etcd_user, self.etcd_password_file)
