"""Makes a server's part in its shard from the settings."""

import ssl
from collections.abc import Callable
from pathlib import Path

from kvpool.core.errors import InvalidArgumentError, NotPrimaryError
from kvpool.core.state import State
from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Member, new_member_id
from kvpool.server.cluster.etcd_directory import EtcdDirectory
from kvpool.server.cluster.identity import IdentityFile
from kvpool.server.cluster.record_codec import check_member
from kvpool.server.cluster.shard import Shard
from kvpool.server.config import ServerConfig
from kvpool.server.journal.journal import Journal
from kvpool.wire.address import host_and_port

_SETTINGS = {"addresses": "advertise", "replication_address": "replication_advertise"}
"""Settings of the fields of a member that have another name."""
_ANY_HOST = ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


def make_shard(  # noqa: PLR0913 - the parts that it connects
    config: ServerConfig,
    journal: Journal,
    make_state: Callable[[], State],
    *,
    certificates: Certificates | None,
    tokens: TokenFile | None,
    state_seconds: Callable[[], float],
    on_primary: Callable[[int, bool], None],
    on_deposed: Callable[[NotPrimaryError], None],
) -> Shard:
    """Makes a server's part in its shard.

    Args:
        config: The settings.
        journal: See `Shard`.
        make_state: See `Shard`.
        certificates: Certificates of the connections of standbys; None for plaintext.
        tokens: The tokens that standbys must have; None to check none.
        state_seconds: See `Shard`.
        on_primary: See `Shard`.
        on_deposed: See `Shard`.

    Raises:
        OSError: The journal's folder belongs to another shard, or a file cannot be read.
        ValueError: See `own_member`.
    """
    cluster, folder = config.cluster, Path(config.journal.folder)
    etcd = cluster.etcd
    addresses = own_member(config).addresses
    return Shard(
        cluster,
        EtcdDirectory(etcd),
        IdentityFile(folder, f"{etcd.cluster}/{cluster.shard}"),
        journal,
        make_state,
        state_seconds=state_seconds,
        addresses=addresses,
        server_tls=certificates.new_context() if certificates else None,
        client_tls=_client_tls(cluster),
        check_token=tokens.check_standby if tokens else None,
        on_primary=on_primary,
        on_deposed=on_deposed,
    )


def own_member(config: ServerConfig) -> Member:
    """This server as a member of a shard, with a new id.

    Raises:
        ValueError: It has no address for clients, other machines could not use the addresses, or they are too long for
            the record of a shard.
    """
    cluster = config.cluster
    addresses = cluster.advertise or tuple(each for each in config.addresses if not each.startswith("unix:"))
    replication_address = cluster.replication_advertise or cluster.replication_listen
    for name, address in (*(("advertise", each) for each in addresses), ("replication_advertise", replication_address)):
        _check_reachable(name, address)
    if not addresses:
        raise ValueError("advertise: clients need a TCP address of this server")
    member = Member(new_member_id(), addresses, replication_address, cluster.zone)
    try:
        check_member(member)
    except InvalidArgumentError as error:
        raise ValueError(f"{_SETTINGS.get(error.field, error.field)}: {error.message}") from error
    return member


def _client_tls(cluster: ClusterConfig) -> ssl.SSLContext | None:
    authorities = cluster.replication_tls_ca
    return ssl.create_default_context(cafile=authorities) if authorities else None


def _check_reachable(name: str, address: str) -> None:
    """Raises ValueError for an address that names no machine or port."""
    host, port = host_and_port(name, address)
    if host in _ANY_HOST or not port:
        raise ValueError(f"{name}: {address} does not say at which host and port others reach this server")
