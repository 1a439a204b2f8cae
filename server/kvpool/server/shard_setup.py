"""Makes a server's part in its shard from the settings."""

import ssl
from dataclasses import replace
from pathlib import Path

from kvpool.core.errors import InvalidArgumentError
from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Member, new_member_id
from kvpool.server.cluster.etcd_directory import EtcdDirectory
from kvpool.server.cluster.identity import IdentityFile
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.record_codec import check_member
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.shard_member import ShardMember, ShardServer
from kvpool.server.config import ServerConfig
from kvpool.wire.address import host_and_port

_SETTINGS = {"addresses": "advertise", "replication_address": "replication_advertise"}
"""Settings of the fields of a member that have another name."""
_ANY_HOST = ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


def make_member(
    config: ServerConfig,
    state: ReplicatedState,
    server: ShardServer,
    *,
    certificates: Certificates | None,
    tokens: TokenFile | None,
) -> ShardMember:
    """Makes a server's part in its shard.

    Args:
        config: The settings.
        state: The state that is replicated.
        server: The server around it.
        certificates: Certificates of the connections of standbys; None for plaintext.
        tokens: The tokens that standbys must have; None to check none.

    Raises:
        OSError: The journal's folder belongs to another shard, or a file cannot be read.
        ValueError: See `own_member`.
    """
    cluster, etcd = config.cluster, config.cluster.etcd
    me = own_member(config)
    identity = IdentityFile(Path(config.journal.folder), etcd.shard)
    settings = MemberSettings(
        cluster,
        identity.identity.shard,
        replace(me, member_id=identity.identity.member_id),
        server_tls=certificates.new_context() if certificates else None,
        client_tls=_client_tls(cluster),
        tokens=tokens,
    )
    return ShardMember(settings, EtcdDirectory(etcd), identity, state, server)


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
    member = Member(new_member_id(), addresses, replication_address)
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
