"""Instances on nodes: names, addresses and ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isochunk.pd.connectors import CONNECTORS, Connector
from isochunk.pd.problems import KeyPath, Problem, show
from isochunk.pd.topology import Decode, Instance, Node, Prefill, Topology

LOCAL = Node(host="127.0.0.1")
Role = Literal["prefill", "decode"]
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Server:
    """One vLLM server: an instance or one of its replicas, with its place.

    Args:
        name: unique in the deployment.
        role: "prefill" or "decode".
        instance: its settings.
        path: where those stand in the file.
        nodes: names of the nodes it runs on, the one with the API first.
        hosts: their addresses.
        port: of the API, on each node that has one.
        kv_ports: first and last port of the connector's side channel on each of the nodes that
            has one.
    """

    name: str
    role: Role
    instance: Prefill | Decode
    path: KeyPath
    nodes: tuple[str, ...]
    hosts: tuple[str, ...]
    port: int
    kv_ports: tuple[tuple[int, int], ...]

    @property
    def num_local_ranks(self) -> int:
        """Data-parallel ranks on each node."""
        return self.instance.data_parallel_size // len(self.nodes) or 1

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Addresses and ports of its API."""
        num = len(self.nodes) if self.instance.load_balancer == "hybrid" else 1
        return [(self.reach(i), self.port) for i in range(num)]

    def listen(self, index: int) -> str:
        """What its API binds on its ``index``-th node."""
        return self.instance.host or self.hosts[index]

    def reach(self, index: int) -> str:
        """The address of its API on its ``index``-th node."""
        host = self.listen(index)
        return self.hosts[index] if host in _ANY else host

    def is_dynamic(self) -> bool:
        """Whether it sizes prefill chunks dynamically: by default a prefill pipeline does."""
        if self.instance.dynamic_chunking is not None:
            return self.instance.dynamic_chunking.enabled
        return self.role == "prefill" and self.instance.pipeline_parallel_size > 1


def get_connector(topology: Topology) -> Connector | None:
    """The connector that the topology names; None if it is unknown."""
    transfer = topology.kv_transfer
    if transfer.module_path is not None:
        protocol = transfer.protocol or ""
        return Connector(transfer.connector, transfer.module_path, protocol=protocol)
    return CONNECTORS.get(transfer.connector)


def get_nodes(topology: Topology) -> dict[str, Node]:
    """The nodes; without any in the file, this machine as "local"."""
    return topology.nodes or {"local": LOCAL}


def get_router_node(topology: Topology, servers: Sequence[Server]) -> str:
    """The router's node: the one named, else that of the first prefill instance."""
    return topology.router.node or servers[0].nodes[0]


def place(topology: Topology) -> tuple[list[Server], list[Problem]]:
    """All servers of the deployment; instances that name no or unknown nodes are problems."""
    nodes = get_nodes(topology)
    connector = get_connector(topology)
    next_kv_port: dict[str, int] = {}
    servers: list[Server] = []
    problems: list[Problem] = []
    groups: tuple[tuple[Role, Sequence[Prefill | Decode]], ...] = (
        ("prefill", topology.prefill),
        ("decode", topology.decode),
    )
    for role, instances in groups:
        for i, instance in enumerate(instances):
            found = _find_nodes(instance, nodes, (role, i))
            if isinstance(found, Problem):
                problems.append(found)
                continue
            hosts = tuple(nodes[name].host for name in found)
            for replica in range(instance.replicas):
                name = instance.name or f"{role}-{i}"
                if instance.replicas > 1:
                    name = f"{name}-{replica}"
                kv_ports: tuple[tuple[int, int], ...] = ()
                if connector and connector.port_env:
                    first = max(next_kv_port.get(host, connector.default_port) for host in hosts)
                    if instance.kv_port is not None:
                        first = instance.kv_port + replica * instance.data_parallel_size
                    kv_ports = _kv_ports(connector, role, instance, len(found), first)
                if kv_ports:
                    next_kv_port |= dict.fromkeys(hosts, kv_ports[-1][1] + 1)
                port = instance.port + replica
                servers.append(
                    Server(name, role, instance, (role, i), found, hosts, port, kv_ports)
                )
    return servers, problems


def _kv_ports(
    connector: Connector, role: str, instance: Instance, num_nodes: int, first: int
) -> tuple[tuple[int, int], ...]:
    """Ports of the side channel, from ``first`` on: vLLM counts them up over all ranks."""
    local = instance.data_parallel_size // num_nodes
    if connector.is_port_per_rank and local:
        return tuple((first + i * local, first + (i + 1) * local - 1) for i in range(num_nodes))
    if connector.is_port_per_rank:
        return ((first, first),)
    if role == "decode":
        return ()
    return ((first, first),) * (num_nodes if instance.load_balancer == "hybrid" else 1)


def _find_nodes(
    instance: Instance, nodes: dict[str, Node], path: KeyPath
) -> tuple[str, ...] | Problem:
    known = ", ".join(nodes)
    if instance.node and instance.nodes:
        return Problem((*path, "nodes"), "is given beside node", "one of the two")
    named = tuple(instance.nodes) or ((instance.node,) if instance.node else ())
    if not named and len(nodes) == 1:
        return tuple(nodes)
    if not named:
        return Problem((*path, "node"), "is missing: there are several nodes", known)
    key = "nodes" if instance.nodes else "node"
    for name in named:
        if name not in nodes:
            return Problem((*path, key), f"{show(name)} is not under nodes", known)
    if len(set(named)) < len(named):
        return Problem((*path, key), f"{show(list(named))} names a node twice", "each node once")
    return named
