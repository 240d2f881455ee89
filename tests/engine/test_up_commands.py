"""What `isochunk up` would run is what the installed vLLM understands."""

import json
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from isochunk.flags import add_flags
from isochunk.pd.commands import make_parts
from isochunk.pd.connectors import CONNECTORS
from isochunk.pd.owned import OWNED_ENV, OWNED_FLAGS
from isochunk.pd.topology_file import load_topology

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="isochunk")
    serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    add_flags(serve)
    return parser


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_vllm_parses_the_commands_of_the_examples(
    parser: FlexibleArgumentParser, example: Path
) -> None:
    deployment = load_topology(example)
    servers = {server.name: server for server in deployment.servers}
    parts = [part for part in make_parts(deployment) if part.role != "router"]
    for part in parts:
        args = parser.parse_args(list(part.argv))
        instance = servers[part.name.partition(".")[0]].instance
        assert args.model_tag == part.argv[1]
        assert args.pipeline_parallel_size == instance.pipeline_parallel_size
        assert args.tensor_parallel_size == instance.tensor_parallel_size
        assert args.data_parallel_size == instance.data_parallel_size
        assert args.enable_dynamic_chunking == (part.role == "prefill")
        config = args.kv_transfer_config
        if not isinstance(config, KVTransferConfig):
            config = KVTransferConfig(**(json.loads(config) if isinstance(config, str) else config))
        assert config.is_kv_producer == (part.role == "prefill")
        assert config.is_kv_consumer == (part.role == "decode")


def test_connectors_are_those_of_vllm() -> None:
    for connector in CONNECTORS.values():
        if connector.module_path is None:
            assert connector.vllm_class in KVConnectorFactory._registry


def test_owned_flags_and_variables_exist(parser: FlexibleArgumentParser) -> None:
    from vllm import envs

    (subparsers,) = (a for a in parser._actions if a.dest == "subparser")
    known = subparsers.choices["serve"]._option_string_actions
    assert [flag for flag in OWNED_FLAGS if flag not in known] == []
    assert [name for name in OWNED_ENV if name not in envs.environment_variables] == []
