"""What a topology file holds: model, prefill and decode instances, KV transfer, router, nodes."""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from isochunk.config import DynamicChunkingConfig
from isochunk.pd.vllm_args import VALID, check_args


def _check_address(host: str) -> str:
    return str(IPv6Address(host)) if ":" in host else host


Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=64,
        description="at most 64 letters, digits, '.', '_' and '-'",
    ),
]
Host = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9._:-]*$", description="a host name or IP address"),
    AfterValidator(_check_address),
]
Port = Annotated[int, Field(ge=1, le=65535, description="a TCP port, 1..65535")]
Count = Annotated[int, Field(ge=1, le=4096, description="a whole number, 1..4096")]
Tokens = Annotated[int, Field(ge=1, description="a whole number of tokens > 0")]
Seconds = Annotated[float, Field(gt=0, le=86400, description="seconds, above 0 up to 86400")]
EnvName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="names of variables")
]
Env = Annotated[
    dict[EnvName, str | None],
    Field(default_factory=dict, description="variables and their values; null takes one back"),
]
VllmArgs = Annotated[
    Any, AfterValidator(check_args), Field(default_factory=dict, description=VALID)
]


def _chunking(value: object) -> object:
    """``true`` and ``false``; settings alone mean enabled."""
    if isinstance(value, bool):
        return {"enabled": value}
    return {"enabled": True, **value} if isinstance(value, dict) else value


def _calibration(value: object) -> object:
    return {"enabled": value} if isinstance(value, bool) else value


def _action(value: object) -> object:
    return {"action": value} if isinstance(value, str) else value


Chunking = Annotated[
    DynamicChunkingConfig | None,
    BeforeValidator(_chunking),
    Field(default=None, description="true, false, or settings such as {policy: equal-latency}"),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Node(_Model):
    """A machine."""

    host: Host = Field(description="the address that the other nodes reach it under")


class KVTransfer(_Model):
    """How KV blocks get from prefill to decode."""

    connector: str = Field(description="push, nixl, nixl-pull or mooncake, or a class's name")
    module_path: str | None = Field(None, description="the module of a class of your own")
    protocol: Literal["push", "nixl", "mooncake"] | None = Field(
        None, description="push, nixl or mooncake: how the router talks to a class of your own"
    )
    kv_buffer_device: str | None = Field(None, description="cuda, cpu or xpu")
    kv_load_failure_policy: Literal["recompute", "fail"] | None = Field(
        None, description="recompute or fail"
    )
    extra_config: dict[str, Any] = Field(
        default_factory=dict, description="a mapping: vLLM's kv_connector_extra_config"
    )


class Instance(_Model):
    """A vLLM server, or several equal ones, on one node or across nodes."""

    name: Name | None = Field(None, description="letters, digits, '.', '_' and '-'")
    node: Name | None = Field(None, description="a name under nodes")
    nodes: list[Name] = Field(default_factory=list, description="a list of names under nodes")
    host: Host | None = Field(None, description="the address to listen on")
    port: Port
    replicas: int = Field(1, ge=1, le=64, description="a whole number, 1..64")
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    data_parallel_size: Count = 1
    data_parallel_size_local: Count | None = Field(None, description="ranks on each node")
    load_balancer: Literal["internal", "hybrid"] = Field(
        "internal", description="internal (one API endpoint) or hybrid (one on each node)"
    )
    rendezvous_port: Port = 29550
    kv_port: Port | None = Field(None, description="a TCP port, 1..65535")
    devices: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="a list of device numbers, such as [0, 1]"
    )
    max_num_batched_tokens: Tokens | None = Field(None, description="a whole number of tokens > 0")
    dynamic_chunking: Chunking
    args: VllmArgs
    env: Env


class Prefill(Instance):
    """A prefill instance."""

    layer_partition: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, description="layers of each pipeline stage, such as [16, 16]"
    )


class Decode(Instance):
    """A decode instance."""


class Router(_Model):
    """The router in front. Loopback unless told otherwise."""

    host: Host = Field("127.0.0.1", description="the address to listen on")
    port: Port = 8000
    node: Name | None = Field(None, description="a name under nodes")
    args: VllmArgs
    env: Env


class Calibrate(_Model):
    """Calibration of the prefill instances before the deployment is ready."""

    enabled: bool = Field(True, description="true or false")
    prompt_tokens: Tokens | None = Field(None, description="a whole number of tokens > 0")
    requests: Count = 5


class OnFailure(_Model):
    """What follows when an instance dies while the deployment serves."""

    action: Literal["stop", "restart"] = Field("stop", description="stop or restart")
    max_restarts: int = Field(3, ge=0, le=1000, description="a whole number, 0..1000")
    within_s: Seconds = 600.0
    backoff_s: Seconds = 2.0


class Topology(_Model):
    """A prefill-decode deployment."""

    model: str = Field(
        pattern=r"^[^-\s]", description="a model directory, hub name, toy or smollm2"
    )
    served_model_name: str | None = Field(None, min_length=1, description="a name for clients")
    num_layers: Count | None = Field(None, description="a whole number, 1..4096")
    kv_transfer: KVTransfer
    prefill: list[Prefill] = Field(min_length=1, description="a list of at least one instance")
    decode: list[Decode] = Field(min_length=1, description="a list of at least one instance")
    router: Router = Field(
        default_factory=lambda: Router.model_validate({}), description="a mapping: host, port, node"
    )
    nodes: dict[Name, Node] = Field(
        default_factory=dict, description="a mapping such as {prefill-0: {host: 10.0.0.1}}"
    )
    args: VllmArgs
    env: Env
    calibrate: Annotated[Calibrate, BeforeValidator(_calibration)] = Field(
        default=Calibrate(enabled=False), description="true, false or {prompt_tokens, requests}"
    )
    on_failure: Annotated[OnFailure, BeforeValidator(_action)] = Field(
        default=OnFailure(), description="stop, restart or {action, max_restarts, within_s}"
    )
    startup_timeout_s: Seconds = 900.0
    shutdown_timeout_s: Seconds = 30.0
