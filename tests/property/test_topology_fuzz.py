"""Whatever a topology file holds: a deployment whose commands can be run, or a TopologyError."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isochunk.pd.check_report import describe_deployment
from isochunk.pd.commands import calibrations, make_parts
from isochunk.pd.problems import TopologyError
from isochunk.pd.topology import Decode, Instance, KVTransfer, Prefill, Router, Topology
from isochunk.pd.topology_file import load_topology, parse_topology

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
KEYS = sorted(
    {key for model in (Topology, Prefill, Decode, KVTransfer, Router) for key in model.model_fields}
    | {"enabled", "policy", "host", "--port", "-tp", "action", "<<", "="}
)
WORDS = ("push", "nixl", "mooncake", "hybrid", "stop", "restart", "local", "decode-0", "router")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([2**63, 8000, 8100, 65535, 65536, 10**30])
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def parse_or_explain(text: str) -> None:
    try:
        deployment = parse_topology(text, "fuzz.yaml")
    except TopologyError as error:
        explanation = str(error)
    else:
        explanation = ""
    if explanation:
        starts = [line.partition(": ")[0] for line in explanation.splitlines()]
        assert all(start.startswith("fuzz.yaml:") for start in starts)
        return
    commands = [part.argv for part in make_parts(deployment)]
    for argv in [*commands, *calibrations(deployment).values()]:
        assert all(isinstance(arg, str) and "\0" not in arg for arg in argv)
        assert " ".join(argv).encode()
    assert describe_deployment(deployment).encode()


def paths(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in children:
        found.append((*prefix, key))
        if isinstance(value, dict | list):
            found += paths(value, (*prefix, key))
    return found


@st.composite
def mutated_examples(draw: st.DrawFn) -> str:
    """An example with a few values replaced, removed or added."""
    data = copy.deepcopy(yaml.safe_load(draw(st.sampled_from(EXAMPLES)).read_text()))
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(paths(data)))
        parent = data
        for key in way:
            parent = parent[key]
        action = draw(st.sampled_from(["replace", "remove", "add", "repeat"]))
        if action == "replace":
            parent[last] = draw(values)
        elif action == "remove":
            del parent[last]
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(KEYS))] = draw(values)
        else:
            parent.append(copy.deepcopy(parent[last]) if action == "repeat" else draw(values))
        if not paths(data):
            break
    return yaml.safe_dump(data, allow_unicode=draw(st.booleans()))


@st.composite
def broken_texts(draw: st.DrawFn) -> str:
    """An example's text with a piece cut out or put in."""
    text = draw(st.sampled_from(EXAMPLES)).read_text()
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 40)))
    pieces = (
        "&a ",
        "*a",
        "!!int ",
        "!x ",
        "? ",
        "[",
        "}",
        ": ",
        "- ",
        '"',
        "\t",
        "\n",
        "--- ",
        "%",
    )
    return text[:start] + draw(st.sampled_from(pieces) | st.text(max_size=6)) + text[end:]


@settings(max_examples=150)
@given(mutated_examples())
def test_mutated_examples(text: str) -> None:
    parse_or_explain(text)


@settings(max_examples=150)
@given(broken_texts())
def test_broken_texts(text: str) -> None:
    parse_or_explain(text)


@settings(max_examples=80)
@given(st.text())
def test_any_text(text: str) -> None:
    parse_or_explain(text)


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(sorted(Topology.model_fields)), values))
def test_any_values_of_known_keys(data: dict[str, Any]) -> None:
    parse_or_explain(yaml.safe_dump(data))


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(sorted(Instance.model_fields)), values))
def test_any_instance(data: dict[str, Any]) -> None:
    base: dict[str, Any] = {"model": "m", "kv_transfer": {"connector": "nixl"}}
    base |= {"prefill": [{"port": 1, **data}], "decode": [{"port": 5, **data}]}
    parse_or_explain(yaml.safe_dump(base))


@settings(max_examples=50)
@given(st.binary())
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(data)
    with pytest.raises(TopologyError, match=r"^fuzz\.yaml:|^/"):
        load_topology(path)
