"""The settings of a server's part in its shard."""

import ssl
from dataclasses import dataclass

from kvpool.server.auth.token_file import TokenFile
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Member


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """What a member of a shard gets from the settings of its server.

    Attributes:
        cluster: The settings of the shard.
        shard: Name of the shard.
        me: This server.
        server_tls: TLS for the connections of standbys; None for plaintext.
        client_tls: TLS for the connection to a primary; None for plaintext.
        tokens: The tokens that standbys must have; None to check none.
    """

    cluster: ClusterConfig
    shard: str
    me: Member
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None
    tokens: TokenFile | None = None
