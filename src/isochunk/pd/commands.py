"""The processes of a deployment: command lines and environment, node by node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isochunk.config import DynamicChunkingConfig
from isochunk.flags import spell_flag
from isochunk.pd.placement import LOCAL, Server, get_connector, get_nodes, get_router_node
from isochunk.pd.topology import Env, Topology
from isochunk.pd.topology_file import Deployment
from isochunk.pd.vllm_args import iterate_flags, merge_args

BUILT_IN_MODELS = ("toy", "smollm2")
MODEL_DIRECTORY = Path("demo-out/models")


@dataclass(frozen=True)
class Part:
    """One process on one node.

    Args:
        name: unique in the deployment; a further node's part of a server is "name.1".
        role: "prefill", "decode" or "router".
        node: where it runs.
        argv: arguments of ``isochunk``.
        env: variables to set; None: to take away.
        health_url: answers 200 once it serves. A part without an API has its server's.
        about: a few words on it.
    """

    name: str
    role: str
    node: str
    argv: tuple[str, ...]
    env: dict[str, str | None] = field(hash=False)
    health_url: str
    about: str


def model_path(topology: Topology) -> str:
    """The model as vLLM gets it; built-in ones are directories that ``isochunk up`` makes."""
    is_built_in = topology.model in BUILT_IN_MODELS
    return str(MODEL_DIRECTORY / topology.model) if is_built_in else topology.model


def make_parts(deployment: Deployment) -> list[Part]:
    """All processes, the router last."""
    topology, servers = deployment.topology, deployment.servers
    parts = [
        _server_part(topology, server, i) for server in servers for i in range(len(server.nodes))
    ]
    return [*parts, _router_part(topology, servers)]


def calibrations(deployment: Deployment) -> dict[str, tuple[str, ...]]:
    """Prefill server -> arguments of ``isochunk`` that calibrate it."""
    topology = deployment.topology
    if not topology.calibrate.enabled:
        return {}
    commands = {}
    for server in deployment.servers:
        if not server.is_dynamic() or server.instance.pipeline_parallel_size == 1:
            continue
        argv = ["calibrate", "--base-url", _url(*server.endpoints[0])]
        num_tokens = topology.calibrate.prompt_tokens or _longest_prompt(topology, server)
        if num_tokens:
            argv += ["--prompt-tokens", str(num_tokens)]
        argv += ["--requests", str(topology.calibrate.requests)]
        commands[server.name] = tuple(argv)
    return commands


def _longest_prompt(topology: Topology, server: Server) -> int | None:
    """What fits beside a token of output, where the file gives ``max-model-len`` as a number."""
    lengths = [
        int(value)
        for args in (topology.args, server.instance.args)
        for _, flag, value in iterate_flags(args)
        if flag == "--max-model-len" and str(value).isdecimal()
    ]
    return lengths[-1] - 1 if lengths and lengths[-1] > 1 else None


def _server_part(topology: Topology, server: Server, index: int) -> Part:
    instance = server.instance
    is_api = index < len(server.endpoints)
    argv = ["serve", model_path(topology)]
    name = topology.served_model_name or (
        topology.model if topology.model in BUILT_IN_MODELS else ""
    )
    if name:
        argv += ["--served-model-name", name]
    if is_api:
        argv += ["--host", server.listen(index), "--port", str(server.port)]
    for flag, size in (
        ("--pipeline-parallel-size", instance.pipeline_parallel_size),
        ("--tensor-parallel-size", instance.tensor_parallel_size),
    ):
        if size > 1:
            argv += [flag, str(size)]
    argv += _ranks(server, index)
    if not is_api:
        argv += ["--headless"]
    if instance.max_num_batched_tokens is not None:
        argv += ["--max-num-batched-tokens", str(instance.max_num_batched_tokens)]
    if server.is_dynamic():
        argv += _chunking(instance.dynamic_chunking)
    argv += ["--kv-transfer-config", json.dumps(_kv_transfer(topology, server, index))]
    argv += merge_args(topology.args, instance.args)
    health_url = f"{_url(*server.endpoints[index if is_api else 0])}/health"
    return Part(
        f"{server.name}.{index}" if index else server.name,
        server.role,
        server.nodes[index],
        tuple(argv),
        _environment(topology, server, index),
        health_url,
        _about(server, index),
    )


def _ranks(server: Server, index: int) -> Iterator[str]:
    """vLLM's flags for ranks on several nodes, and for data-parallel ranks."""
    instance, num_nodes = server.instance, len(server.nodes)
    port = str(instance.rendezvous_port)
    if instance.data_parallel_size > 1:
        local = server.num_local_ranks
        yield from ("--data-parallel-size", str(instance.data_parallel_size))
        if num_nodes > 1:
            yield from ("--data-parallel-size-local", str(local))
            if instance.load_balancer == "hybrid":
                yield "--data-parallel-hybrid-lb"
            if index or instance.load_balancer == "hybrid":
                yield from ("--data-parallel-start-rank", str(index * local))
            yield from ("--data-parallel-address", server.hosts[0])
            yield from ("--data-parallel-rpc-port", port)
    elif num_nodes > 1:
        yield from ("--nnodes", str(num_nodes), "--node-rank", str(index))
        yield from ("--master-addr", server.hosts[0], "--master-port", port)


def _chunking(settings: DynamicChunkingConfig | None) -> Iterator[str]:
    yield "--enable-dynamic-chunking"
    for setting in DynamicChunkingConfig.model_fields if settings else ():
        value = getattr(settings, setting)
        if settings and setting in settings.model_fields_set - {"enabled"} and value is not None:
            if not isinstance(value, bool):
                yield from (spell_flag(setting), str(value))
            elif value:
                yield spell_flag(setting)


def _kv_transfer(topology: Topology, server: Server, index: int) -> dict[str, Any]:
    connector, transfer = get_connector(topology), topology.kv_transfer
    assert connector is not None  # checked with the file
    config: dict[str, Any] = {"kv_connector": connector.vllm_class}
    if connector.module_path:
        config["kv_connector_module_path"] = connector.module_path
    config["kv_role"] = "kv_producer" if server.role == "prefill" else "kv_consumer"
    if transfer.kv_buffer_device:
        config["kv_buffer_device"] = transfer.kv_buffer_device
    if transfer.kv_load_failure_policy:
        config["kv_load_failure_policy"] = transfer.kv_load_failure_policy
    extra = dict(transfer.extra_config)
    host = server.hosts[index]
    if connector.host_setting and server.role == "prefill" and host != LOCAL.host:
        extra.setdefault(connector.host_setting, host)
    if extra:
        config["kv_connector_extra_config"] = extra
    return config


def _environment(topology: Topology, server: Server, index: int) -> Env:
    instance, connector = server.instance, get_connector(topology)
    env: Env = {}
    partition = getattr(instance, "layer_partition", None)
    if partition:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(str(layers) for layers in partition)
    if instance.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in instance.devices)
    if connector and connector.host_env:
        env[connector.host_env] = server.hosts[index]
    if connector and connector.port_env and server.kv_ports:
        env[connector.port_env] = str(server.kv_ports[0][0])
    return env | topology.env | instance.env


def _router_part(topology: Topology, servers: tuple[Server, ...]) -> Part:
    router, connector = topology.router, get_connector(topology)
    assert connector is not None  # checked with the file
    argv = ["router", "--host", router.host, "--port", str(router.port)]
    for role, option in (("prefill", "--prefiller"), ("decode", "--decoder")):
        ends = [end for server in servers if server.role == role for end in server.endpoints]
        argv += [f"{option}-hosts", *(host for host, _ in ends)]
        argv += [f"{option}-ports", *(str(port) for _, port in ends)]
    if connector.router_ports:
        first_ports = [first for s in servers for first, _ in s.kv_ports[: len(s.endpoints)]]
        argv += [connector.router_ports, *(str(port) for port in first_ports)]
    argv += ["--kv-connector", connector.protocol, *merge_args({}, router.args)]
    url = router_url(topology, servers)
    node = get_router_node(topology, servers)
    return Part("router", "router", node, tuple(argv), dict(router.env), f"{url}/health", "router")


def router_url(topology: Topology, servers: tuple[Server, ...]) -> str:
    """Where clients reach the router."""
    router = topology.router
    node = get_nodes(topology)[get_router_node(topology, servers)]
    return _url(node.host if router.host in ("0.0.0.0", "::") else router.host, router.port)


def _about(server: Server, index: int) -> str:
    instance = server.instance
    sizes = (
        ("PP", instance.pipeline_parallel_size),
        ("DP", instance.data_parallel_size),
        ("TP", instance.tensor_parallel_size),
    )
    shape = " × ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"
    words = [server.role, shape]
    if server.is_dynamic():
        words.append("dynamic chunking")
    if len(server.nodes) > 1:
        words.append(f"node {index + 1} of {len(server.nodes)}")
    return ", ".join(words)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
