"""Topology files: read, validated, and placed on nodes, or one error with all problems."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from isochunk.pd.checks import find_problems, find_warnings
from isochunk.pd.placement import Server
from isochunk.pd.problems import Problem, TopologyError, describe, show
from isochunk.pd.topology import Topology
from isochunk.pd.yaml_lines import read_yaml


@dataclass(frozen=True)
class Deployment:
    """A topology that passed all checks.

    Args:
        file: where it came from.
        topology: what the file says.
        servers: its vLLM servers, placed.
        warnings: lines for the user.
    """

    file: str
    topology: Topology
    servers: tuple[Server, ...]
    warnings: tuple[str, ...]


def load_topology(path: Path) -> Deployment:
    """Read a topology file.

    Raises:
        TopologyError: it can't be read or something in it is wrong.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise TopologyError([f"{path}: {error.strerror}; valid: a topology file"]) from None
    except UnicodeDecodeError as error:
        raise TopologyError([f"{path}: not UTF-8 at byte {error.start}; valid: UTF-8"]) from None
    return parse_topology(text, path.name)


def parse_topology(text: str, file: str) -> Deployment:
    """A deployment from the text of a topology file; ``file`` is its name in messages.

    Raises:
        TopologyError: something in it is wrong; the message has a line per problem.
    """
    document = read_yaml(text, file)
    if not isinstance(document.data, dict):
        found = "is empty" if document.data is None else f"{show(document.data)} is no mapping"
        raise TopologyError(
            [f"{file}:1: file: {found}; valid: a mapping with {', '.join(Topology.model_fields)}"]
        )
    try:
        topology = Topology.model_validate(document.data)
    except ValidationError as error:
        raise TopologyError(describe(file, document.lines, _explain(error))) from None
    servers, problems = find_problems(topology)
    if problems:
        raise TopologyError(describe(file, document.lines, problems))
    warnings = describe(file, document.lines, find_warnings(topology, servers))
    return Deployment(file, topology, tuple(servers), tuple(warnings))


def _explain(error: ValidationError) -> Iterator[Problem]:
    for mistake in error.errors(include_url=False):
        path = mistake["loc"][:-1] if mistake["loc"][-1] == "[key]" else mistake["loc"]
        field, parent = _find_field(path)
        message = mistake["msg"]
        valid = (field.description if field else None) or message
        if mistake["type"] == "extra_forbidden":
            known = list(parent.model_fields)
            close = difflib.get_close_matches(str(path[-1]), known, 1)
            hint = f", did you mean {close[0]}?" if close else ""
            yield Problem(path, f"unknown key{hint}", ", ".join(known))
        elif mistake["type"] == "missing":
            yield Problem(path, "is missing", valid)
        else:
            yield Problem(path, f"{show(mistake['input'])} is not valid", valid)


def _find_field(path: tuple[Any, ...]) -> tuple[FieldInfo | None, type[BaseModel]]:
    """The field that a path ends in, and the model that its last key belongs to."""
    field, model, parent = None, Topology, Topology
    for key in path:
        if key in model.model_fields:
            field, parent = model.model_fields[key], model
            model = _inner_model(field.annotation) or model
        else:  # a list position, a free key, or an unknown one
            parent = model
    return field, parent


def _inner_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_inner_model(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model), None)
