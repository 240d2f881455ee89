"""Flags and variables that follow from the topology and so can't be given as extra ones."""

from __future__ import annotations

from collections.abc import Iterator

from isochunk.pd.problems import KeyPath, Problem, show
from isochunk.pd.topology import Env
from isochunk.pd.vllm_args import Args, iterate_flags

# Flags that follow from the topology, and where to set what they mean.
OWNED_FLAGS = {
    "--model": "model on top",
    "--served-model-name": "served_model_name on top",
    "--host": "host",
    "--port": "port",
    "--headless": "nodes",
    "--tensor-parallel-size": "tensor_parallel_size",
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "--data-parallel-size": "data_parallel_size",
    "--data-parallel-size-local": "data_parallel_size_local",
    "--data-parallel-rank": "nodes",
    "--data-parallel-start-rank": "nodes",
    "--data-parallel-address": "nodes",
    "--data-parallel-rpc-port": "rendezvous_port",
    "--data-parallel-hybrid-lb": "load_balancer",
    "--data-parallel-external-lb": "load_balancer",
    "--data-parallel-multi-port-external-lb": "load_balancer",
    "--nnodes": "nodes",
    "--node-rank": "nodes",
    "--master-addr": "nodes",
    "--master-port": "rendezvous_port",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--kv-transfer-config": "kv_transfer",
    "--enable-dynamic-chunking": "dynamic_chunking",
    "--config": "args, one by one",
    "--api-key": "VLLM_API_KEY in env",
}
_SHORT_FLAGS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
_ROUTER_FLAGS = {
    "--host": "host",
    "--port": "port",
    "--prefiller-hosts": "prefill",
    "--prefiller-ports": "prefill",
    "--decoder-hosts": "decode",
    "--decoder-ports": "decode",
    "--prefiller-bootstrap-ports": "kv_port",
    "--kv-connector": "kv_transfer",
}
OWNED_ENV = {
    "VLLM_PP_LAYER_PARTITION": "layer_partition",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "nodes",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "kv_port",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "kv_port",
}


def check_owned(args: Args, env: Env, path: KeyPath) -> Iterator[Problem]:
    """Flags and variables in ``args`` and ``env`` at ``path`` that the topology sets itself."""
    yield from _check_flags(iterate_flags(args), (*path, "args"), OWNED_FLAGS)
    for name in OWNED_ENV.keys() & env.keys():
        message = f"{show(env[name])} is set from the topology"
        yield Problem((*path, "env", name), message, f"{OWNED_ENV[name]} of the instance")


def check_router_args(args: Args) -> Iterator[Problem]:
    """The same for the router."""
    yield from _check_flags(iterate_flags(args), ("router", "args"), _ROUTER_FLAGS)


def _check_flags(
    flags: Iterator[tuple[str | int, str, object]], path: KeyPath, owned: dict[str, str]
) -> Iterator[Problem]:
    for key, given, value in flags:
        name = _SHORT_FLAGS.get(given, given).split(".")[0].rstrip("+")
        positive = name.replace("--no-", "--", 1)
        # argparse takes an unambiguous beginning for the flag itself.
        found = [flag for flag in owned if flag.startswith(positive) and len(positive) > 4]
        if name.startswith("--dynamic-chunking-"):
            found, setting = [name], "dynamic_chunking"
        elif found:
            setting = owned[found[0]]
        if found:
            message = f"{given} {show(value)} would override the topology"
            yield Problem((*path, key), message, f"{setting} of the topology")
