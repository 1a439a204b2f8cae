"""Options of `kvpool serve` for authentication, clusters and limits."""

from typing import Final

import click

from kvpool.cli.options import file_option, text_option, together
from kvpool.cli.settings import config_options
from kvpool.server.auth.config import PLAINTEXT_KINDS
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.limits.config import DEFAULT_LIMITS
from kvpool.wire.address import DEFAULT_SOCKET_MODE

_SECTIONS: Final = {
    "config": "Settings",
    "listen": "Addresses, metrics and traces",
    "max_message_bytes": "Pools and shutdown",
    "default_lease_seconds": "Leases of sessions",
    "heartbeat_seconds": "Ranks",
    "journal": "Journal and epochs",
    "tls_cert": "TLS and tokens",
    "cluster": "Cluster",
    "max_step_operations": "Limits on clients",
    "log_level": "Logs and help",
}
"""By its first option: the heading of each section of `kvpool serve --help`."""


class SectionedCommand(click.Command):
    """Shows the options in the sections of `_SECTIONS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections."""
        sections: list[tuple[str, list[tuple[str, str]]]] = []
        for param in self.get_params(ctx):
            if param.name in _SECTIONS:
                sections.append((_SECTIONS[param.name], []))
            if record := param.get_help_record(ctx):
                sections[-1][1].append(record)
        for heading, records in sections:
            with formatter.section(heading):
                formatter.write_dl(records)


def _file_mode(text: str) -> int:
    """Parses a file mode in octal digits."""
    try:
        return int(str(text), 8)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a file mode such as 0660") from None


def _as_set(_ctx: click.Context, _param: click.Parameter, kinds: tuple[str, ...]) -> frozenset[str]:
    return frozenset(kinds)


auth_options: Final = together(
    file_option("--tls-cert", "Serve TLS on TCP with this certificate chain (PEM, the server's certificate first)."),
    file_option("--tls-key", "Private key of --tls-cert, without a passphrase. Changed files are reloaded."),
    file_option("--tls-client-ca", "Require client certificates that these authorities signed."),
    file_option("--tokens", "Require a token of this file for each call; see docs/how-to/secure.md."),
    click.option(
        "--allow-plaintext",
        type=click.Choice(PLAINTEXT_KINDS),
        multiple=True,
        callback=_as_set,
        help="Allow this without TLS on addresses that other machines reach. Can be repeated.",
    ),
    click.option(
        "--socket-mode",
        type=_file_mode,
        default=f"{DEFAULT_SOCKET_MODE:04o}",
        metavar="MODE",
        help="File mode of unix sockets. Users with write permission can connect.",
    ),
)
"""Adds the options of `AuthConfig`."""

cluster_options: Final = together(
    text_option(
        "--cluster",
        "URL",
        "Share the pools with the other servers of SHARD; etcd://HOST:PORT,HOST:PORT/SHARD says which of them is the "
        "primary. Needs a journal. Off by default; see docs/how-to/high-availability.md.",
    ),
    config_options(ClusterConfig(), etcd_user="User of etcd, if etcd requires one."),
    file_option("--etcd-password-file", "Password of --etcd-user."),
    file_option("--etcd-tls-ca", "Connect to etcd with TLS; these authorities signed its certificates."),
    file_option("--etcd-tls-cert", "Certificate of this server for etcd, if etcd requires one."),
    file_option("--etcd-tls-key", "Private key of --etcd-tls-cert."),
    click.option(
        "--advertise",
        multiple=True,
        metavar="HOST:PORT",
        help="Address at which clients reach this server. Default: --listen. Can be repeated.",
    ),
    config_options(
        ClusterConfig(),
        standbys="Number of standbys that the shard should have; fewer are reported as missing.",
        claim_term="Begin this term, whatever the directory holds: the way out when the directory or all other servers "
        "of the shard are lost. No effect once a server has seen the term.",
        replication_listen="Address at which standbys connect, host:port.",
        replication_advertise="Address at which standbys reach this server. Default: --replication-listen.",
        min_in_sync="Servers in sync, the primary included, below which calls get UNAVAILABLE, NOT_CONFIRMED.",
        takeover_seconds="Silence of a primary that sends changes after which its standby takes over.",
        standby_timeout_seconds="How long a standby may delay answers before the primary continues without it.",
        confirm_seconds="How long an answer waits for the standbys before the caller must repeat its call.",
        replication_log_bytes="Size of the changes that are kept for a standby that reconnects or loads a snapshot.",
    ),
    file_option("--replication-token-file", "Token of the role standby, which this server sends to the primary."),
    file_option("--replication-tls-ca", "Connect to the primary with TLS; these authorities signed its certificate."),
)
"""Adds the options of `ClusterConfig`."""

LIMITS_HELP: Final = {
    "max_step_operations": "Maximum operations of a step.",
    "max_sessions": "Maximum sessions of all pools together.",
    "max_pool_sessions": "Maximum sessions of a pool.",
    "max_token_sessions": "Maximum sessions of a token (by name) in all pools together.",
    "max_token_pools": "Maximum pools that a token (by name) has created or formed.",
    "max_total_blocks": "Maximum blocks of all pools together.",
    "max_token_blocks": "Maximum blocks of all pools that a token (by name) has created or formed.",
    "max_token_calls": "Maximum concurrent calls of a token (by name), including streams.",
    "max_total_requests": "Maximum requests of all sessions together.",
    "max_token_requests": "Maximum requests of all sessions of a token (by name) together.",
    "max_session_requests": "Maximum requests of a session.",
    "max_total_tokens": "Maximum tokens of all requests of all sessions together.",
    "max_token_tokens": "Maximum tokens of all requests of all sessions of a token (by name) together.",
    "max_session_tokens": "Maximum tokens of all requests of a session together.",
    "max_session_blocks": "Maximum blocks that a session may hold or be guaranteed; 0: no limit.",
    "max_watches": "Maximum concurrent watches of block events.",
    "max_waiting_steps": "Maximum queued steps and calls.",
    "max_waiting_bytes": "Maximum bytes of the messages of queued steps and calls, those up to 64 KiB excluded.",
    "max_calls": "Maximum concurrent calls, including streams.",
    "max_connections": "Maximum connections of each address; 0: what the limit of open files allows, up to 8192.",
    "max_memory_bytes": "Memory of the process beyond which changes that need more are refused; 0: no limit.",
    "max_event_bytes": "Maximum bytes of block events that all pools together keep for watchers.",
    "stall_seconds": "How long a client may leave messages unread, or delay a handshake or the first message.",
}

limits_options: Final = config_options(DEFAULT_LIMITS, **LIMITS_HELP)
"""Adds the options of `Limits`. See docs/reference/limits.md."""
