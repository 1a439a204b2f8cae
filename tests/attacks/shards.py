"""The primary of a shard as the target, with its standby and etcd."""

from typing import Any

import grpc

from attacks.target import Target
from kvpool.v1 import directory_pb2, directory_pb2_grpc
from support.auth import secret_of
from support.etcd import EtcdCluster
from support.server import CommandLineServer, free_port
from support.waiting import wait_until

_PATIENT = ("--takeover-seconds", "60", "--standby-timeout-seconds", "60")
"""No server loses its role because the machine is busy."""
_ANSWER_SECONDS = 10.0


class ShardTarget(Target):
    """A primary. See `Target`.

    Attributes:
        shard: Name of the shard.
        standby: The standby's process.
        replication_port: Port at which standbys connect.
    """

    shard = "attacks"

    def __init__(self, *arguments: Any) -> None:
        self.replication_port = free_port()
        self._etcd: EtcdCluster | None = None
        super().__init__(*arguments)
        wait_until(lambda: self.is_ready() and self.term(), "the server is the primary")
        tls = [*self.tls_options, "--tokens", self.tokens, "--log-format", "json"]
        options = [*tls, "--journal", self.folder / "standby", *self._cluster_options(free_port())]
        self.standby = CommandLineServer(f"localhost:{free_port()}", options=options, waits=False)
        self.wait_in_sync()

    def more_options(self) -> list[object]:
        """Starts etcd. See `Target`."""
        self._etcd = EtcdCluster(self.folder / "etcd", 1)
        return self._cluster_options(self.replication_port)

    def _cluster_options(self, replication_port: int) -> list[object]:
        assert self._etcd
        token = self.folder / "standby.token"
        token.write_text(secret_of("standby"))
        token.chmod(0o600)
        options: list[object] = ["--cluster", f"etcd://{self._etcd.endpoints[0]}/{self.shard}"]
        options += ["--replication-listen", f"127.0.0.1:{replication_port}", *_PATIENT]
        return [*options, "--replication-tls-ca", self.authority.path, "--replication-token-file", token]

    def term(self) -> int:
        """Term of the shard while the target is the primary; 0 if it is not."""
        found = self._shard_record()
        return found.term if found and self.address in found.primary_addresses else 0

    def wait_in_sync(self) -> None:
        """Waits until the standby is in sync."""

        def is_in_sync() -> bool:
            found = self._shard_record()
            return found is not None and len(found.members) == 2

        wait_until(is_in_sync, "the standby is in sync")

    def _shard_record(self) -> directory_pb2.Shard | None:
        """What the target says of its shard; None if it does not answer."""
        with self.channel("operator") as channel:
            stub = directory_pb2_grpc.DirectoryServiceStub(channel)
            try:
                return stub.GetShard(directory_pb2.GetShardRequest(), timeout=_ANSWER_SECONDS).shard
            except grpc.RpcError:
                return None

    def errors(self) -> list[dict[str, str]]:
        """See `Target`; those of the standby too."""
        return super().errors() + self.errors_of(self.standby)

    def close(self) -> None:
        """Kills all processes."""
        super().close()
        if hasattr(self, "standby"):
            self.standby.kill()
        if self._etcd:
            self._etcd.kill()


def restart_standby(target: Target) -> None:
    """Kills the standby and starts it again; it must become in sync, and the target stay the primary of its term."""
    assert isinstance(target, ShardTarget)
    term = target.term()
    target.standby.restart()
    target.wait_in_sync()
    assert target.term() == term, f"term {target.term()} after {term}"
