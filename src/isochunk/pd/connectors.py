"""KV connectors: what a topology's ``connector`` means to vLLM.

From vLLM 0.32's sources: NIXL's push variant and Mooncake take layers by name from the stages of a
pipeline-parallel prefill; NIXL's pull variant doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Connector:
    """How a connector is configured.

    Args:
        vllm_class: vLLM's ``kv_connector``.
        module_path: where it is loaded from, if vLLM doesn't know it.
        takes_pipeline: whether a prefill with more than one pipeline stage can use it.
        protocol: ``--kv-connector`` of the router.
        host_env: variable for the address that its side channel is reached under.
        port_env: variable for the first port of its side channel.
        default_port: where those ports start on a node.
        router_ports: option of the router for those ports of the prefill instances.
        host_setting: key of ``kv_connector_extra_config`` for the address where prefill listens;
            127.0.0.1 without it.
        is_port_per_rank: whether data-parallel ranks use a port each, on both sides; else it is
            one port, on prefill instances only.
    """

    vllm_class: str
    module_path: str | None = None
    takes_pipeline: bool = True
    protocol: str = "nixl"
    host_env: str | None = None
    port_env: str | None = None
    default_port: int = 0
    router_ports: str | None = None
    host_setting: str | None = None
    is_port_per_rank: bool = True


_NIXL = Connector(
    "NixlPushConnector",
    host_env="VLLM_NIXL_SIDE_CHANNEL_HOST",
    port_env="VLLM_NIXL_SIDE_CHANNEL_PORT",
    default_port=5600,
)

CONNECTORS = {
    "push": Connector(
        "PushConnector",
        module_path="isochunk.vllm.push.connector",
        protocol="push",
        host_setting="host",
    ),
    "nixl": _NIXL,
    "nixl-pull": replace(_NIXL, vllm_class="NixlPullConnector", takes_pipeline=False),
    "mooncake": Connector(
        "MooncakeConnector",
        protocol="mooncake",
        port_env="VLLM_MOONCAKE_BOOTSTRAP_PORT",
        default_port=8998,
        router_ports="--prefiller-bootstrap-ports",
        is_port_per_rank=False,
    ),
}
