"""Real etcd clusters for tests, on loopback addresses of their own, so that a restarted node finds its ports free."""

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from support.waiting import DEADLINE_SECONDS

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed; on Debian: apt-get install etcd-server"
)
_CLIENT_PORT, _PEER_PORT = 2379, 2380


class EtcdNode:
    """A member of an etcd cluster.

    Attributes:
        endpoint: Address for clients, `host:port`.
        folder: Its data.
    """

    def __init__(self, name: str, host: str, folder: Path, options: Sequence[str], scheme: str) -> None:
        self.name = name
        self.endpoint = f"{host}:{_CLIENT_PORT}"
        self.peer_url = f"http://{host}:{_PEER_PORT}"
        self.folder = folder
        self._options = options
        self._url = f"{scheme}://{self.endpoint}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, initial_cluster: str, token: str) -> None:
        """Starts the process, with the data of its last run if there are any."""
        command = ["etcd", "--name", self.name, "--data-dir", str(self.folder), "--log-level", "error"]
        command += ["--listen-client-urls", self._url, "--advertise-client-urls", self._url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", initial_cluster, "--initial-cluster-token", token, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kills the process, paused or not."""
        if self._process:
            self._process.kill()
            self._process.wait(DEADLINE_SECONDS)

    def stop(self) -> None:
        """Stops the process cleanly, so that its folder is complete."""
        assert self._process
        self._process.terminate()
        self._process.wait(DEADLINE_SECONDS)

    def pause(self) -> None:
        """Pauses the process, and waits until its threads stand still. Its connections stay open."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Continues after `pause`."""
        assert self._process
        self._process.send_signal(signal.SIGCONT)


class EtcdCluster:
    """A cluster of etcd with one or three nodes."""

    def __init__(
        self,
        folder: Path,
        size: int,
        options: Sequence[str] = (),
        scheme: str = "http",
        addresses: Sequence[str] = (),
    ) -> None:
        host = ".".join(["127", *(str(random.randint(2, 250)) for _ in range(2))])  # noqa: S311 - no secret
        self.nodes = [
            EtcdNode(f"n{number}", address, folder / f"n{number}", options, scheme)
            for number, address in enumerate(addresses or [f"{host}.{number + 1}" for number in range(size)])
        ]
        self._generation = 1
        for node in self.nodes:
            self.start(node)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses of the nodes for clients."""
        return tuple(node.endpoint for node in self.nodes)

    @property
    def host(self) -> str:
        """Host of the first node."""
        return self.nodes[0].endpoint.partition(":")[0]

    def start(self, node: EtcdNode) -> None:
        """Starts a node that does not run."""
        node.start(",".join(f"{each.name}={each.peer_url}" for each in self.nodes), f"generation-{self._generation}")

    def replace(self) -> None:
        """Replaces the cluster, which must not run, by an empty one on the same addresses with another id."""
        self._generation += 1
        for node in self.nodes:
            shutil.rmtree(node.folder)
            self.start(node)

    def kill(self) -> None:
        """Kills all nodes."""
        for node in self.nodes:
            node.kill()

    def post(self, path: str, node: int = 0, token: str = "", **body: object) -> dict[str, Any]:
        """Calls the HTTP gateway of a node, again until it answers. Bytes are sent in base64.

        Raises:
            urllib.error.HTTPError: etcd refuses the call.
        """
        fields = {name: _base64(value) if isinstance(value, bytes) else value for name, value in body.items()}
        request = urllib.request.Request(
            f"http://{self.nodes[node].endpoint}/v3/{path}",
            json.dumps(fields).encode(),
            {"Authorization": token} if token else {},
        )
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:  # noqa: S310 - as above
                    answer: dict[str, Any] = json.load(response)
                    return answer
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:  # no leader yet
                    raise
            except OSError:  # not listening yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def enable_authentication(self, user: str, password: str, prefix: str) -> None:
        """Adds user root with password `root`, and a user that may read and write a prefix; then requires passwords."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        self.post("auth/role/add", name="shards")
        permission = {"permType": "READWRITE", "key": _base64(prefix.encode()), "range_end": _base64(end.encode())}
        self.post("auth/role/grant", name="shards", perm=permission)
        for name, word, role in (("root", "root", "root"), (user, password, "shards")):
            self.post("auth/user/add", name=name, password=word)
            self.post("auth/user/grant", user=name, role=role)
        self.post("auth/enable")

    def change_password(self, user: str, password: str) -> None:
        """Changes a user's password. Tokens of the user become invalid."""
        token = self.post("auth/authenticate", name="root", password="root")["token"]  # noqa: S106 - of a test
        self.post("auth/user/changepw", token=token, name=user, password=password)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


@contextlib.contextmanager
def etcd_cluster(
    size: int = 1, options: Sequence[str] = (), scheme: str = "http", addresses: Sequence[str] = ()
) -> Iterator[EtcdCluster]:
    """Runs a cluster in a temporary folder."""
    with TemporaryDirectory() as folder:
        cluster = EtcdCluster(Path(folder), size, options, scheme, addresses)
        try:
            yield cluster
        finally:
            cluster.kill()
