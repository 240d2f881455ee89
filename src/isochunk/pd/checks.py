"""Checks of a topology that need more than one field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from isochunk.config import OWN_KEY, ConfigError, DynamicChunkingConfig, resolve_config
from isochunk.pd.connectors import CONNECTORS
from isochunk.pd.owned import check_owned, check_router_args
from isochunk.pd.placement import Server, get_connector, get_nodes, place
from isochunk.pd.ports import PortUse, list_port_uses
from isochunk.pd.problems import KeyPath, Problem, show
from isochunk.pd.topology import Instance, Topology
from isochunk.pd.vllm_args import Args, flag_name, iterate_flags


def find_problems(topology: Topology) -> tuple[list[Server], list[Problem]]:
    """The servers, and everything that would keep the deployment from working."""
    servers, problems = place(topology)
    problems += [*_check_connector(topology), *_check_names(topology, servers)]
    problems += check_owned(topology.args, topology.env, ())
    problems += check_router_args(topology.router.args)
    groups = (("prefill", topology.prefill), ("decode", topology.decode))
    for role, instances in groups:
        for i, instance in enumerate(instances):
            problems += _check_sizes(instance, (role, i))
            problems += check_owned(instance.args, instance.env, (role, i))
    num_layers = find_num_layers(topology)
    for i, prefill in enumerate(topology.prefill):
        if prefill.layer_partition is not None:
            path = ("prefill", i, "layer_partition")
            stages = prefill.pipeline_parallel_size
            problems += _check_partition(prefill.layer_partition, stages, num_layers, path)
    for server in _first_replicas(servers):
        problems += _check_chunking(topology, server)
    if not problems:  # they would only follow from the others
        problems += _check_ports(list_port_uses(topology, servers))
    return servers, problems


def find_warnings(topology: Topology, servers: Sequence[Server]) -> list[Problem]:
    """What works, but hardly as meant."""
    warnings = []
    for server in _first_replicas(servers):
        instance, path = server.instance, server.path
        if server.is_dynamic() and instance.pipeline_parallel_size == 1:
            message = "has nothing to do with one pipeline stage"
            warnings.append(Problem((*path, "dynamic_chunking"), message))
        settings, budget = _resolve(instance), instance.max_num_batched_tokens
        if settings.enabled and budget and settings.is_min_chunk_too_large(budget):
            message = f"{settings.explain_min_chunk(budget)}: chunks stay fixed"
            warnings.append(Problem((*path, "dynamic_chunking"), message))
    for one, other in combinations(servers, 2):
        shared = set(one.instance.devices or ()) & set(other.instance.devices or ())
        if shared and set(one.hosts) & set(other.hosts):
            message = f"{sorted(shared)} are also those of {one.name} on the same node"
            warnings.append(Problem((*other.path, "devices"), message))
    if topology.calibrate.enabled and not any(server.is_dynamic() for server in servers):
        warnings.append(Problem(("calibrate",), "no instance uses dynamic chunking"))
    return warnings


def find_num_layers(topology: Topology) -> int | None:
    """The model's layers: as given, or from the ``config.json`` of a model directory here."""
    if topology.num_layers is not None:
        return topology.num_layers
    try:
        config = json.loads((Path(topology.model) / "config.json").read_bytes())
        found = config.get(
            "num_hidden_layers", config.get("text_config", {}).get("num_hidden_layers")
        )
    except (OSError, ValueError, AttributeError):  # vLLM will say what is wrong with it
        return None
    return found if isinstance(found, int) else None


def _resolve(instance: Instance) -> DynamicChunkingConfig:
    """The settings as the server will see them: some of them choose a policy."""
    given = instance.dynamic_chunking
    unchecked = {"trace_file"}  # on the machine where it runs
    own = given.model_dump(exclude_unset=True, exclude=unchecked) if given else None
    return resolve_config({OWN_KEY: own}, {})


def _first_replicas(servers: Sequence[Server]) -> list[Server]:
    return list({server.path: server for server in reversed(servers)}.values())[::-1]


def _check_connector(topology: Topology) -> Iterator[Problem]:
    transfer, path = topology.kv_transfer, ("kv_transfer", "connector")
    if transfer.module_path is not None and transfer.protocol is None:
        message = f"is missing: the router must know how to use {transfer.connector}"
        yield Problem(("kv_transfer", "protocol"), message, "push, nixl or mooncake")
    if transfer.module_path is None and transfer.protocol is not None:
        message = f"{show(transfer.protocol)} goes with a class of your own"
        yield Problem(("kv_transfer", "protocol"), message, "only beside module_path")
    connector = get_connector(topology)
    takers = [name for name, known in CONNECTORS.items() if known.takes_pipeline]
    stages = max(prefill.pipeline_parallel_size for prefill in topology.prefill)
    if connector is None:
        message = f"{show(transfer.connector)} is not known to transfer KV from prefill to decode"
        valid = f"{', '.join(CONNECTORS)}, or a class of your own with module_path and protocol"
        yield Problem(path, message, valid)
    elif stages > 1 and not connector.takes_pipeline:
        message = f"{show(transfer.connector)} doesn't take KV from {stages} pipeline stages"
        yield Problem(path, message, ", ".join(takers))


def _check_names(topology: Topology, servers: Sequence[Server]) -> Iterator[Problem]:
    seen = {"router": "the router"}
    for server in servers:
        if server.name in seen:
            message = f"{show(server.name)} is already the name of {seen[server.name]}"
            yield Problem((*server.path, "name"), message, "a name of its own")
        seen[server.name] = f"another {server.role} instance"
    node, nodes = topology.router.node, get_nodes(topology)
    if node is not None and node not in nodes:
        yield Problem(("router", "node"), f"{show(node)} is not under nodes", ", ".join(nodes))


def _check_sizes(instance: Instance, path: KeyPath) -> Iterator[Problem]:
    num_nodes = len(instance.nodes) or 1
    ranks, local = instance.data_parallel_size, instance.data_parallel_size_local
    stages, width = instance.pipeline_parallel_size, instance.tensor_parallel_size
    if path[0] == "decode" and stages > 1:
        message = f"{stages} is not valid: decode runs without pipeline parallelism"
        yield Problem((*path, "pipeline_parallel_size"), message, "1, or leave it out")
    if ranks > 1 and ranks % num_nodes:
        message = f"{ranks} ranks don't divide among {num_nodes} nodes"
        yield Problem((*path, "data_parallel_size"), message, f"a multiple of {num_nodes}")
    elif local is not None and local * num_nodes != ranks:
        message = f"{local} on each of {num_nodes} nodes aren't data_parallel_size = {ranks}"
        valid = str(ranks // num_nodes)
        yield Problem((*path, "data_parallel_size_local"), message, valid)
    if ranks == 1 and (stages * width) % num_nodes:
        message = f"{num_nodes} nodes can't share {stages} stages × {width} tensor-parallel ranks"
        yield Problem((*path, "nodes"), message, f"a number that divides {stages * width}")
    if instance.load_balancer == "hybrid" and (ranks == 1 or num_nodes == 1):
        message = "'hybrid' needs data-parallel ranks on several nodes"
        yield Problem((*path, "load_balancer"), message, "internal, or leave it out")
    if instance.host and instance.host not in ("0.0.0.0", "::") and num_nodes > 1:
        message = f"{show(instance.host)} can't be the address on {num_nodes} nodes"
        yield Problem((*path, "host"), message, "0.0.0.0, or leave it out")
    if instance.devices is not None:
        needed = max(stages * width * ranks // num_nodes, 1)
        if instance.replicas > 1:
            message = f"{instance.devices} would be those of {instance.replicas} replicas"
            yield Problem((*path, "devices"), message, "instances written out, each with its own")
        elif len(set(instance.devices)) != needed or len(instance.devices) != needed:
            message = f"{show(instance.devices)} doesn't match the ranks on a node"
            yield Problem((*path, "devices"), message, f"{needed} different device numbers")


def _check_partition(
    partition: list[int], stages: int, num_layers: int | None, path: KeyPath
) -> Iterator[Problem]:
    of_layers = f" that sum to {num_layers}" if num_layers else ""
    valid = f"{stages} numbers{of_layers}"
    if len(partition) != stages:
        message = f"{show(partition)} has {len(partition)} parts for {stages} pipeline stages"
        yield Problem(path, message, valid)
    elif num_layers and sum(partition) != num_layers:
        message = f"{show(partition)} sums to {sum(partition)}, the model has {num_layers} layers"
        yield Problem(path, message, valid)


def _check_chunking(topology: Topology, server: Server) -> Iterator[Problem]:
    path = (*server.path, "dynamic_chunking")
    if server.role == "decode":
        if server.is_dynamic():
            message = "true is not valid: a KV consumer doesn't prefill"
            yield Problem(path, message, "false, or leave it out")
        yield from _check_additional_config(topology, server)
        return
    settings = server.instance.dynamic_chunking
    if settings and "runtime_calibration" in settings.model_fields_set:
        message = "can't be set here: without it chunks stay fixed"
        yield Problem((*path, "runtime_calibration"), message, "leave it out")
    if not server.is_dynamic():
        return
    for where, args in _both_args(topology, server):
        for key, flag, value in iterate_flags(args):
            is_off = flag == "--no-enable-chunked-prefill" or (
                flag == "--enable-chunked-prefill" and value is False
            )
            if is_off or (flag == "--scheduler-cls" and value is not None):
                message = f"{flag} {show(value)} can't be combined with dynamic chunking"
                yield Problem((*where, key), message, "leave it out, or dynamic_chunking: false")


def _check_additional_config(topology: Topology, server: Server) -> Iterator[Problem]:
    for where, args in _both_args(topology, server):
        for key, flag, value in iterate_flags(args):
            if flag_name(flag) != "--additional-config":
                continue
            try:
                given = json.loads(value) if isinstance(value, str) else value
                is_on = isinstance(given, dict) and resolve_config(given, {}).enabled
            except ConfigError:
                is_on = True
            except (ValueError, RecursionError):  # not JSON: vLLM will say so
                continue
            if is_on:
                message = "turns on dynamic chunking on a KV consumer, which doesn't prefill"
                yield Problem((*where, key), message, "leave it out for decode")


def _both_args(topology: Topology, server: Server) -> list[tuple[KeyPath, Args]]:
    return [(("args",), topology.args), ((*server.path, "args"), server.instance.args)]


def _check_ports(uses: list[PortUse]) -> Iterator[Problem]:
    for use in uses:
        if use.last > 65535:
            message = f"{use.what} would reach port {use.last}"
            yield Problem(use.path, message, f"a port up to {65535 - (use.last - use.first)}")
    for one, other in combinations(uses, 2):
        if one.host == other.host and one.first <= other.last and other.first <= one.last:
            port = max(one.first, other.first)
            message = f"{port} is both {one.what}'s and {other.what}'s on {other.host}"
            yield Problem(other.path, message, "a port of its own")
