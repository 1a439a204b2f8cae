"""Hosts on this machine: network namespaces with their own addresses, joined by a bridge. Needs root and iproute2."""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pytest

_IP: Final = shutil.which("ip") or ""


def _ip(*arguments: str) -> None:
    subprocess.run([_IP, *arguments], check=True)


def _are_possible() -> bool:
    if os.geteuid() or not _IP:
        return False
    name = f"kvpool-{os.getpid()}"
    if subprocess.run([_IP, "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    _ip("netns", "delete", name)
    return True


needs_hosts = pytest.mark.skipif(not _are_possible(), reason="hosts on this machine need root and iproute2")


@dataclass(frozen=True)
class Host:
    """A host, or only an address of this machine.

    Attributes:
        address: Its IP address.
        prefix: What to put before a command, to run it there.
        switch: The namespace of the bridge; empty without one.
        port: Its device there.
    """

    address: str
    prefix: tuple[str, ...] = ()
    switch: str = ""
    port: str = ""

    def isolate(self) -> None:
        """Takes it off the network: all its packets are lost, and connections stay open."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        """Brings it back."""
        _ip("-n", self.switch, "link", "set", self.port, "up")


def _make_switch() -> int:
    """Makes a namespace whose number is free. Others run, or were killed before they removed theirs."""
    for number in random.sample(range(1, 251), 250):
        if not subprocess.run([_IP, "netns", "add", f"kvpool-{number}"], capture_output=True, check=False).returncode:
            return number
    raise RuntimeError("250 namespaces of hosts are left: remove them with ip netns delete")


class Hosts:
    """Some hosts, which reach each other and this machine, over a bridge in a namespace of its own.

    Attributes:
        addresses: Three addresses of this machine, which the hosts reach.
        hosts: The hosts.
    """

    def __init__(self, count: int) -> None:
        number = _make_switch()
        self._net = f"10.213.{number}"
        self.addresses = [f"{self._net}.{last}" for last in (101, 102, 103)]
        self._switch = f"kvpool-{number}"
        self._names = [self._switch, *(f"{self._switch}-{i}" for i in range(1, count + 1))]
        for name in self._names[1:]:
            _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        self._device = f"kvpool{number}"
        _ip("link", "add", self._device, "type", "veth", "peer", "name", "port0", "netns", self._switch)
        self._attach("port0")
        for address in self.addresses:
            _ip("address", "add", f"{address}/24", "dev", self._device)
        _ip("link", "set", self._device, "up")
        self.hosts = [self._add(i, name) for i, name in enumerate(self._names[1:], start=1)]

    def close(self) -> None:
        """Removes them, after their processes have ended."""
        _ip("link", "delete", self._device)
        for name in self._names:
            _ip("netns", "delete", name)

    def _add(self, number: int, name: str) -> Host:
        host = Host(f"{self._net}.{number}", (_IP, "netns", "exec", name), self._switch, f"port{number}")
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", host.port, "netns", self._switch)
        self._attach(host.port)
        _ip("-n", name, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        return host

    def _attach(self, port: str) -> None:
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")


@contextlib.contextmanager
def made_hosts(count: int) -> Iterator[tuple[Sequence[Host], Sequence[str]]]:
    """Makes hosts for as long as the context lasts, if any are wanted. Yields them, and `Hosts.addresses`."""
    if not count:
        yield (), ()
        return
    with contextlib.closing(Hosts(count)) as made:
        yield made.hosts, made.addresses
