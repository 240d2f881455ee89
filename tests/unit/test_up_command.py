"""`isochunk up` up to the point where it would start processes."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from isochunk.cli import app
from tests.unit.test_topology import MINIMAL, two_nodes_decode


def up(tmp_path: Path, text: str, *options: str) -> Result:
    file = tmp_path / "deploy.yaml"
    file.write_text(text)
    return CliRunner().invoke(app, ["up", str(file), *options])


def test_check_prints_a_shell_script(tmp_path: Path) -> None:
    result = up(tmp_path, MINIMAL, "--check")
    assert result.exit_code == 0
    assert result.stderr == ""
    commands = [line for line in result.stdout.splitlines() if line.startswith("isochunk ")]
    assert commands == [
        *["isochunk serve demo-out/models/toy \\"] * 2,
        "isochunk router \\",
    ]


def test_warnings_go_beside_the_script(tmp_path: Path) -> None:
    text = MINIMAL.replace("pipeline_parallel_size: 2", "dynamic_chunking: true")
    result = up(tmp_path, text, "--check")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: deploy.yaml:5: prefill[0].dynamic_chunking:")


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_mistakes_end_with_status_2(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = up(tmp_path, "model: toy\n", *options)
    assert result.exit_code == 2
    assert "error: deploy.yaml:1: decode: is missing" in result.stderr


def test_node_selects_its_part(tmp_path: Path) -> None:
    text = two_nodes_decode("data_parallel_size: 2")
    result = up(tmp_path, text, "--check", "--node", "c")
    assert result.exit_code == 0
    assert result.stdout.startswith("# node c (10.0.0.3)\n\n# decode-0.1: decode, DP2, node 2 of 2")
    assert result.stdout.count("isochunk serve") == 1
    assert "isochunk router" not in result.stdout


def test_unknown_node(tmp_path: Path) -> None:
    result = up(tmp_path, MINIMAL, "--node", "x")
    assert result.exit_code == 2
    assert "error: --node x: not in deploy.yaml; valid: local" in result.stderr


def test_several_machines_need_a_node(tmp_path: Path) -> None:
    text = two_nodes_decode("data_parallel_size: 2").replace("10.0.0", "192.0.2")
    result = up(tmp_path, text)
    assert result.exit_code == 2
    assert "give one of --node a | b | c" in result.stderr


def test_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = up(tmp_path, MINIMAL.replace("8200", str(port)))
    assert result.exit_code == 2
    assert f"error: decode-0: port {port} on 127.0.0.1 is in use" in result.stderr
