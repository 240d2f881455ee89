"""The ports of a deployment: which there are, and whether they are free."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from isochunk.pd.placement import Server, get_nodes, get_router_node
from isochunk.pd.problems import KeyPath
from isochunk.pd.topology import Topology


@dataclass(frozen=True)
class PortUse:
    """Ports ``first`` to ``last`` of a node.

    Args:
        what: whose they are, and what for.
        path: the key that sets them.
        node: name of the node.
        host: its address; nodes of one address are one machine.
        listen: the address that gets bound.
    """

    what: str
    path: KeyPath
    node: str
    host: str
    listen: str
    first: int
    last: int


def list_port_uses(topology: Topology, servers: Sequence[Server]) -> list[PortUse]:
    """All ports that the deployment listens on."""
    return [use for server in servers for use in _server_ports(server)] + [
        _router_port(topology, servers)
    ]


def _server_ports(server: Server) -> Iterator[PortUse]:
    place = list(zip(server.nodes, server.hosts, strict=True))
    for i in range(len(server.endpoints)):
        node, host = place[i]
        path = (*server.path, "port")
        yield PortUse(server.name, path, node, host, server.listen(i), server.port, server.port)
    if len(place) > 1:
        node, host = place[0]
        port = server.instance.rendezvous_port
        path = (*server.path, "rendezvous_port")
        yield PortUse(f"{server.name} (rendezvous)", path, node, host, host, port, port)
    for (node, host), (first, last) in zip(place, server.kv_ports, strict=False):
        path = (*server.path, "kv_port")
        yield PortUse(f"{server.name} (KV transfer)", path, node, host, host, first, last)


def _router_port(topology: Topology, servers: Sequence[Server]) -> PortUse:
    router, node = topology.router, get_router_node(topology, servers)
    host = get_nodes(topology)[node].host
    return PortUse("router", ("router", "port"), node, host, router.host, router.port, router.port)


def is_local(host: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_try_to_bind(family, address) is None for family, _, _, _, address in found)


def find_busy(uses: Iterable[PortUse]) -> list[str]:
    """A line for each port that can't be used, most often since something else listens there."""
    lines = []
    for use in uses:
        try:
            found = socket.getaddrinfo(use.listen, 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            lines.append(f"{use.what}: host {use.listen} is not known ({error})")
            continue
        family, _, _, _, address = found[0]
        for port in range(use.first, use.last + 1):
            error_number = _try_to_bind(family, (address[0], port, *address[2:]))
            if error_number == errno.EADDRINUSE:
                lines.append(f"{use.what}: port {port} on {use.listen} is in use")
            # Behind address translation a node can't bind the address that others reach it under.
            elif error_number not in (None, errno.EADDRNOTAVAIL):
                reason = os.strerror(error_number)
                lines.append(f"{use.what}: port {port} on {use.listen}: {reason}")
    return lines


def _try_to_bind(family: int, address: tuple[object, ...]) -> int | None:
    """The error number, or None if it works."""
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            return error.errno
    return None
