"""Topology files: what they become, and what their mistakes are called."""

import json
from pathlib import Path

import pytest

from isochunk.pd.commands import Part, calibrations, make_parts
from isochunk.pd.problems import TopologyError
from isochunk.pd.topology_file import Deployment, load_topology, parse_topology

MINIMAL = """\
model: toy
kv_transfer: {connector: push}
prefill:
  - port: 8100
    pipeline_parallel_size: 2
decode:
  - port: 8200
"""
NODES = "nodes:\n  a: {host: 10.0.0.1}\n  b: {host: 10.0.0.2}\n  c: {host: 10.0.0.3}\n"


def parse(text: str) -> Deployment:
    return parse_topology(text, "deploy.yaml")


def parts(text: str) -> dict[str, Part]:
    return {part.name: part for part in make_parts(parse(text))}


def option(part: Part, flag: str) -> str:
    return part.argv[part.argv.index(flag) + 1]


def two_nodes_decode(settings: str) -> str:
    text = MINIMAL.replace("- port: 8100", "- port: 8100\n    node: a")
    return NODES + text.replace("- port: 8200", f"- port: 8200\n    nodes: [b, c]\n    {settings}")


def test_roles_and_chunking_follow_from_the_place_in_the_file() -> None:
    found = parts(MINIMAL)
    assert list(found) == ["prefill-0", "decode-0", "router"]
    prefill = json.loads(option(found["prefill-0"], "--kv-transfer-config"))
    decode = json.loads(option(found["decode-0"], "--kv-transfer-config"))
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    assert "--enable-dynamic-chunking" in found["prefill-0"].argv
    assert "--enable-dynamic-chunking" not in found["decode-0"].argv
    assert found["prefill-0"].health_url == "http://127.0.0.1:8100/health"
    router = (
        "router --host 127.0.0.1 --port 8000 --prefiller-hosts 127.0.0.1 --prefiller-ports 8100 "
        "--decoder-hosts 127.0.0.1 --decoder-ports 8200 --kv-connector push"
    )
    assert " ".join(found["router"].argv) == router


def test_chunking_settings_become_flags() -> None:
    chunking = "\n    dynamic_chunking: {policy: equal-latency, smooth_factor: 0.8}"
    argv = parts(MINIMAL.replace("port: 8100", f"port: 8100{chunking}"))["prefill-0"].argv
    start = argv.index("--enable-dynamic-chunking")
    assert argv[start : start + 5] == (
        "--enable-dynamic-chunking",
        "--dynamic-chunking-policy",
        "equal-latency",
        "--dynamic-chunking-smooth-factor",
        "0.8",
    )
    off = parts(MINIMAL.replace("port: 8100", "port: 8100\n    dynamic_chunking: false"))
    assert "--enable-dynamic-chunking" not in off["prefill-0"].argv


def test_layer_partition_devices_and_environment() -> None:
    settings = "\n    layer_partition: [5, 3]\n    devices: [2, 3]\n    env: {A: no, B: null}"
    text = MINIMAL.replace("port: 8100", f"port: 8100{settings}") + "env: {A: 010, B: x, C: y}\n"
    found = parts(text)
    assert found["prefill-0"].env == {
        "VLLM_PP_LAYER_PARTITION": "5,3",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "A": "no",  # as written, not as YAML's false
        "B": None,
        "C": "y",
    }
    assert found["decode-0"].env == {"A": "010", "B": "x", "C": "y"}


def test_args_go_through_and_an_instance_replaces_common_ones() -> None:
    common = "args: {max_model_len: 8192, enforce-eager: true, seed: 1, async-scheduling: false}\n"
    own = "\n    args: {--max-model-len: 4096, seed: null, lora: [a, b], x: -1, j: {k: [1]}}"
    argv = parts(common + MINIMAL.replace("port: 8100", f"port: 8100{own}"))["prefill-0"].argv
    start = argv.index("--max-model-len")
    assert argv[start:] == (
        *("--max-model-len", "4096", "--enforce-eager", "--no-async-scheduling"),
        *("--lora", "a", "b", "--x=-1", "--j", '{"k": [1]}'),
    )
    listed = MINIMAL.replace("port: 8100", 'port: 8100\n    args: ["--seed", 3, --foo=bar]')
    assert parts(common + listed)["prefill-0"].argv[-3:] == ("--seed", "3", "--foo=bar")


def test_replicas_take_the_next_ports() -> None:
    text = MINIMAL.replace("push", "nixl").replace("port: 8200", "port: 8200\n    replicas: 2")
    found = parts(text)
    assert [option(found[f"decode-0-{i}"], "--port") for i in range(2)] == ["8200", "8201"]
    ports = [part.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT") for part in found.values()]
    assert ports == ["5600", "5601", "5602", None]


def test_data_parallel_decode_across_nodes_has_one_endpoint() -> None:
    found = parts(two_nodes_decode("data_parallel_size: 32"))
    head, other = found["decode-0"], found["decode-0.1"]
    common = {"--data-parallel-size": "32", "--data-parallel-size-local": "16"}
    common |= {"--data-parallel-address": "10.0.0.2", "--data-parallel-rpc-port": "29550"}
    for part in (head, other):
        assert {flag: option(part, flag) for flag in common} == common
    assert "--headless" not in head.argv
    assert "--data-parallel-start-rank" not in head.argv  # would mean hybrid load balancing
    assert "--headless" in other.argv
    assert "--port" not in other.argv
    assert option(other, "--data-parallel-start-rank") == "16"
    assert (head.node, other.node) == ("b", "c")
    assert head.health_url == other.health_url == "http://10.0.0.2:8200/health"
    assert option(found["router"], "--decoder-hosts") == "10.0.0.2"


def test_hybrid_load_balancing_has_an_endpoint_on_each_node() -> None:
    found = parts(two_nodes_decode("data_parallel_size: 4\n    load_balancer: hybrid"))
    for i, name in enumerate(("decode-0", "decode-0.1")):
        part = found[name]
        assert option(part, "--data-parallel-start-rank") == str(2 * i)
        assert "--data-parallel-hybrid-lb" in part.argv
        assert "--headless" not in part.argv
    router = found["router"].argv
    start = router.index("--decoder-hosts")
    assert router[start : start + 6] == (
        *("--decoder-hosts", "10.0.0.2", "10.0.0.3"),
        *("--decoder-ports", "8200", "8200"),
    )


def test_pipeline_across_nodes() -> None:
    text = MINIMAL.replace("port: 8100", "port: 8100\n    nodes: [a, b]")
    found = parts(NODES + text.replace("port: 8200", "port: 8200\n    node: c"))
    for i, name in enumerate(("prefill-0", "prefill-0.1")):
        assert option(found[name], "--nnodes") == "2"
        assert option(found[name], "--node-rank") == str(i)
        assert option(found[name], "--master-addr") == "10.0.0.1"
    assert "--headless" in found["prefill-0.1"].argv


def test_side_channels_use_the_address_of_their_node_and_a_port_per_rank() -> None:
    text = two_nodes_decode("data_parallel_size: 4").replace("push", "nixl")
    found = parts(text.replace("nodes: [b, c]", "nodes: [a, b]"))
    sides = [
        (p.env["VLLM_NIXL_SIDE_CHANNEL_HOST"], p.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        for p in list(found.values())[:3]
    ]
    # vLLM counts up over all ranks from the base.
    assert sides == [("10.0.0.1", "5600"), ("10.0.0.1", "5601"), ("10.0.0.2", "5601")]


def test_push_listens_where_other_nodes_reach_it() -> None:
    found = parts(two_nodes_decode("data_parallel_size: 2"))
    config = json.loads(option(found["prefill-0"], "--kv-transfer-config"))
    assert config["kv_connector_extra_config"] == {"host": "10.0.0.1"}
    assert "extra_config" not in option(found["decode-0"], "--kv-transfer-config")


def test_router_learns_the_bootstrap_ports_of_mooncake() -> None:
    text = MINIMAL.replace("push", "mooncake").replace(P, f"{P}\n    replicas: 2")
    found = parts(text)
    ports = [part.env.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") for part in found.values()]
    assert ports == ["8998", "8999", None, None]
    router = found["router"].argv
    start = router.index("--prefiller-bootstrap-ports")
    assert router[start + 1 : start + 4] == ("8998", "8999", "--kv-connector")


def test_calibration_covers_dynamic_prefill_instances() -> None:
    text = MINIMAL + "calibrate: true\nargs: {max-model-len: 8192}\n"
    expected = "calibrate --base-url http://127.0.0.1:8100 --prompt-tokens 8191 --requests 5"
    assert calibrations(parse(text)) == {"prefill-0": tuple(expected.split())}
    assert calibrations(parse(MINIMAL)) == {}


def test_connector_of_your_own() -> None:
    own = "{connector: MyPush, module_path: my.module, protocol: nixl, extra_config: {a: 1}}"
    found = parts(MINIMAL.replace("{connector: push}", own))
    assert json.loads(option(found["decode-0"], "--kv-transfer-config")) == {
        "kv_connector": "MyPush",
        "kv_connector_module_path": "my.module",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"a": 1},
    }
    assert option(found["router"], "--kv-connector") == "nixl"


def replace(old: str, new: str, text: str = MINIMAL) -> str:
    assert old in text
    return text.replace(old, new)


P, D = "port: 8100", "port: 8200"
TWO = f"{P}\n    pipeline_parallel_size: 2"
MISTAKES = [
    ("", "deploy.yaml:1: file: is empty; valid: a mapping with model,"),
    ("[1]", "deploy.yaml:1: file: [1] is no mapping"),
    ("a: [", "deploy.yaml:1: file: not YAML: expected the node content"),
    ("a: \x07", "deploy.yaml:1: file: not YAML: unacceptable character"),
    (MINIMAL + "model: x\n", "deploy.yaml:8: model: is given twice, first in line 1"),
    ("a: &x 1\nb: *x\n", "deploy.yaml:2: file: *x refers to an anchor; valid: values written out"),
    ("1: 2\n", "deploy.yaml:1: file: the key '1' is not text"),
    ("a: !!python/object:os.system x", "deploy.yaml:1: a: has the tag"),
    ("a: !!set {x}", "deploy.yaml:1: a: has the tag"),
    (f"a: {'9' * 5000}", "deploy.yaml:1: a: '999"),
    ('a: "\\0"', "deploy.yaml:1: a: '\\x00' has a NUL character"),
    ("[" * 3000 + "]" * 3000, "deploy.yaml:1: file: nested too deeply"),
    ("model: toy\n", "deploy.yaml:1: prefill: is missing; valid: a list of at least one instance"),
    (replace(P, "port: 99999"), "deploy.yaml:4: prefill[0].port: 99999 is not valid; valid: a TCP"),
    (replace(P, "port: true"), "deploy.yaml:4: prefill[0].port: True is not valid; valid: a TCP"),
    (replace(P, "name: x"), "deploy.yaml:4: prefill[0].port: is missing; valid: a TCP port"),
    (
        replace(D, f"{D}\n    tensor_paralel_size: 2"),
        "deploy.yaml:8: decode[0].tensor_paralel_size: unknown key, did you mean "
        "tensor_parallel_size?; valid: name, node,",
    ),
    (replace(P, "host: a b\n    port: 1"), "deploy.yaml:4: prefill[0].host: 'a b' is not valid"),
    (replace(P, "host: '::g'\n    port: 1"), "deploy.yaml:4: prefill[0].host: '::g' is not valid"),
    (replace(D, P), "deploy.yaml:7: decode[0].port: 8100 is both prefill-0's and decode-0's on"),
    (replace(D, "port: 8000"), "deploy.yaml:1: router.port: 8000 is both decode-0's and router's"),
    (
        replace("push}", "nixl}").replace(D, f"{D}\n    kv_port: 5600"),
        "deploy.yaml:8: decode[0].kv_port: 5600 is both prefill-0 (KV transfer)'s and",
    ),
    (
        replace("push}", "nixl}").replace(D, f"{D}\n    kv_port: 65535\n    data_parallel_size: 2"),
        "deploy.yaml:8: decode[0].kv_port: decode-0 (KV transfer) would reach port 65536; valid: a "
        "port up to 65534",
    ),
    (
        replace(D, f"{D}\n    pipeline_parallel_size: 2"),
        "deploy.yaml:8: decode[0].pipeline_parallel_size: 2 is not valid: decode runs without "
        "pipeline parallelism; valid: 1, or leave it out",
    ),
    (
        replace(D, f"{D}\n    dynamic_chunking: true"),
        "deploy.yaml:8: decode[0].dynamic_chunking: true is not valid: a KV consumer",
    ),
    (
        replace(D, f"{D}\n    args: {{additional-config: {{isochunk: {{enabled: true}}}}}}"),
        "deploy.yaml:8: decode[0].args.additional-config: turns on dynamic chunking on a KV",
    ),
    (
        replace(P, f"{P}\n    dynamic_chunking: {{smooth_factor: 2}}"),
        "deploy.yaml:5: prefill[0].dynamic_chunking.smooth_factor: 2 is not valid; valid: a number "
        "in [0, 1]",
    ),
    (
        replace(P, f"{P}\n    dynamic_chunking: {{smoth: 2}}"),
        "deploy.yaml:5: prefill[0].dynamic_chunking.smoth: unknown key",
    ),
    (
        replace(P, f"{P}\n    layer_partition: [4, 4, 4]"),
        "deploy.yaml:5: prefill[0].layer_partition: [4, 4, 4] has 3 parts for 2 pipeline stages; "
        "valid: 2 numbers",
    ),
    (
        replace(P, f"{P}\n    layer_partition: [5, 4]") + "num_layers: 8\n",
        "deploy.yaml:5: prefill[0].layer_partition: [5, 4] sums to 9, the model has 8 layers; "
        "valid: 2 numbers that sum to 8",
    ),
    (
        replace("push", "LMCacheConnectorV1"),
        "deploy.yaml:2: kv_transfer.connector: 'LMCacheConnectorV1' is not known to transfer KV",
    ),
    (
        replace("push", "nixl-pull"),
        "deploy.yaml:2: kv_transfer.connector: 'nixl-pull' doesn't take KV from 2 pipeline stages; "
        "valid: push, nixl, mooncake",
    ),
    (
        replace("push", "X, module_path: m"),
        "deploy.yaml:2: kv_transfer.protocol: is missing: the router must know how to use X",
    ),
    (
        replace(P, f"{P}\n    args: {{scheduler-cls: my.Scheduler}}"),
        "deploy.yaml:5: prefill[0].args.scheduler-cls: --scheduler-cls 'my.Scheduler' can't be "
        "combined with dynamic chunking",
    ),
    (
        MINIMAL + "args: [--no-enable-chunked-prefill]\n",
        "deploy.yaml:8: args[0]: --no-enable-chunked-prefill '' can't be combined",
    ),
    (
        MINIMAL + "args: {enable_chunked_prefill: false}\n",
        "deploy.yaml:8: args.enable_chunked_prefill: --enable-chunked-prefill False can't be",
    ),
    (
        MINIMAL + 'args: ["-pp", "4"]\n',
        "deploy.yaml:8: args[0]: -pp '4' would override the topology; valid: "
        "pipeline_parallel_size of the topology",
    ),
    (
        MINIMAL + "args: {pipeline-parallel: 4}\n",
        "deploy.yaml:8: args.pipeline-parallel: --pipeline-parallel 4 would override",
    ),
    (
        MINIMAL + "args: {kv_transfer_config: {}}\n",
        "deploy.yaml:8: args.kv_transfer_config: --kv-transfer-config {} would override",
    ),
    (
        MINIMAL + "args: [--dynamic-chunking-policy=auto]\n",
        "deploy.yaml:8: args[0]: --dynamic-chunking-policy 'auto' would override the topology; "
        "valid: dynamic_chunking of the topology",
    ),
    (MINIMAL + "args: 3\n", "deploy.yaml:8: args: 3 is not valid; valid: a mapping such as"),
    (
        MINIMAL + "env: {VLLM_PP_LAYER_PARTITION: '4,4'}\n",
        "deploy.yaml:8: env.VLLM_PP_LAYER_PARTITION: '4,4' is set from the topology; valid: "
        "layer_partition of the instance",
    ),
    (MINIMAL + "env: {'A=B': x}\n", "deploy.yaml:8: env.A=B: 'A=B' is not valid"),
    (
        replace(P, f"{P}\n    name: x").replace(D, f"{D}\n    name: x"),
        "deploy.yaml:9: decode[0].name: 'x' is already the name of another prefill instance",
    ),
    (replace(P, f"{P}\n    name: router"), "prefill[0].name: 'router' is already the name of"),
    (
        replace(P, f"{P}\n    node: z"),
        "deploy.yaml:5: prefill[0].node: 'z' is not under nodes; valid: local",
    ),
    (NODES + MINIMAL, "deploy.yaml:8: prefill[0].node: is missing: there are several nodes"),
    (MINIMAL + "router: {node: z}\n", "deploy.yaml:8: router.node: 'z' is not under nodes"),
    (
        two_nodes_decode("data_parallel_size: 3"),
        "deploy.yaml:14: decode[0].data_parallel_size: 3 ranks don't divide among 2 nodes; valid: "
        "a multiple of 2",
    ),
    (
        two_nodes_decode("data_parallel_size: 4\n    data_parallel_size_local: 4"),
        "deploy.yaml:15: decode[0].data_parallel_size_local: 4 on each of 2 nodes aren't",
    ),
    (two_nodes_decode("host: 10.0.0.2\n    data_parallel_size: 2"), "'10.0.0.2' can't be the"),
    (
        replace(P, f"{P}\n    devices: [0]"),
        "deploy.yaml:5: prefill[0].devices: [0] doesn't match the ranks on a node; valid: 2 "
        "different device numbers",
    ),
    (replace(D, f"{D}\n    load_balancer: hybrid"), "'hybrid' needs data-parallel ranks on"),
    (MINIMAL + "on_failure: ignore\n", "on_failure.action: 'ignore' is not valid; valid: stop or"),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_name_file_line_key_value_and_what_is_valid(text: str, said: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert "valid" in str(caught.value) or "not YAML" in str(caught.value)


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    text = replace(P, f"{P}\n    layer_partition: [1]").replace(D, f"{D}\n    dynamic_chunking: on")
    with pytest.raises(TopologyError) as caught:
        parse(text + "env: {VLLM_MOONCAKE_BOOTSTRAP_PORT: 1}\n")
    lines = [line.split(" ")[0] for line in str(caught.value).splitlines()]
    assert lines == ["deploy.yaml:5:", "deploy.yaml:9:", "deploy.yaml:10:"]


def test_layer_count_comes_from_the_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    text = replace("model: toy", f"model: {tmp_path}").replace(
        P, f"{P}\n    layer_partition: [8, 8]"
    )
    with pytest.raises(TopologyError, match="sums to 16, the model has 30 layers"):
        parse(text)


def test_warnings() -> None:
    one_stage = replace("pipeline_parallel_size: 2", "dynamic_chunking: true")
    assert parse(one_stage).warnings == (
        "deploy.yaml:5: prefill[0].dynamic_chunking: has nothing to do with one pipeline stage",
    )
    chunking = "dynamic_chunking: {smooth_factor: 0.8}\n    max_num_batched_tokens: 2048"
    (warning,) = parse(replace(P, f"{P}\n    {chunking}")).warnings
    assert "min_chunk_size=4096 is not below max_num_batched_tokens=2048" in warning
    text = replace(P, f"{P}\n    devices: [0, 1]").replace(D, f"{D}\n    devices: [1]")
    assert parse(text).warnings == (
        "deploy.yaml:9: decode[0].devices: [1] are also those of prefill-0 on the same node",
    )


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="No such file"):
        load_topology(tmp_path / "none.yaml")
    with pytest.raises(TopologyError, match="directory"):
        load_topology(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(TopologyError, match="not UTF-8 at byte 10"):
        load_topology(tmp_path / "latin.yaml")
