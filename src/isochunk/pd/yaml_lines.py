"""YAML text as plain data, with the line of every key and list item."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from isochunk.pd.problems import KeyPath, Problem, TopologyError, describe, show

_TAG = "tag:yaml.org,2002:"
_MAX_INT = 2**63
_MAX_DEPTH = 50


class _BadYamlError(Exception):
    def __init__(self, line: int, problem: Problem) -> None:
        super().__init__()
        self.line, self.problem = line, problem


@dataclass
class Document:
    """A YAML document: plain data and the line of each of its paths."""

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_yaml(text: str, file: str) -> Document:
    """Parse one YAML document.

    Values below a key ``env`` stay as written (``no`` is "no", ``010`` is "010"). Anchors are
    refused: a few lines could stand for any amount of data.

    Raises:
        TopologyError: not YAML, or YAML beyond mappings with text keys, lists and scalars.
    """
    document = Document()
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                message, valid = "nested too deeply", f"at most {_MAX_DEPTH} levels"
                raise _BadYamlError(event.start_mark.line + 1, Problem((), message, valid))
            if isinstance(event, yaml.AliasEvent):
                message = f"*{event.anchor} refers to an anchor"
                valid = "values written out; what instances share belongs into args and env on top"
                raise _BadYamlError(event.start_mark.line + 1, Problem((), message, valid))
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            document.data = _build(node, (), document.lines)
    except _BadYamlError as error:
        raise TopologyError(
            describe(file, {(): error.line, error.problem.path: error.line}, [error.problem])
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = Problem((), f"not YAML: {error.problem or error.context}")
        raise TopologyError(describe(file, {(): mark.line + 1 if mark else 1}, [problem])) from None
    except yaml.YAMLError as error:
        raise TopologyError([f"{file}:1: file: not YAML: {str(error).splitlines()[0]}"]) from None
    return document


def _build(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, line)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_build(child, (*path, i), lines) for i, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode) or node.tag != f"{_TAG}map":
        message = f"has the tag {show(node.tag)}"
        raise _BadYamlError(line, Problem(path, message, "mappings, lists, text, numbers"))
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        # "=" and "<<" have tags of their own; whether a key is known is checked later.
        text_tags = [f"{_TAG}{name}" for name in ("str", "value", "merge")]
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in text_tags:
            message = f"the key {show(key_node.value)} is not text"
            raise _BadYamlError(key_line, Problem(path, message, "a name; quote it if need be"))
        key = _text(key_node, path, key_line)
        if key in mapping:
            message = f"is given twice, first in line {lines[(*path, key)]}"
            raise _BadYamlError(key_line, Problem((*path, key), message, "each key once"))
        lines[(*path, key)] = key_line
        mapping[key] = _build(value_node, (*path, key), lines)
    return mapping


def _scalar(node: yaml.ScalarNode, path: KeyPath, line: int) -> Any:
    kind = node.tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if path[-2:-1] == ("env",) or kind not in ("bool", "int", "float"):
        if node.tag.startswith(_TAG) and kind in ("str", "timestamp", "bool", "int", "float"):
            return _text(node, path, line)
        raise _BadYamlError(
            line, Problem(path, f"has the tag {show(node.tag)}", "text, a number, true or false")
        )
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (ValueError, KeyError, IndexError, OverflowError):  # of !!int and !!bool on other text
        value = None
    if value is None or (kind == "int" and abs(value) >= _MAX_INT):
        message = f"{show(node.value)} is not a usable number or boolean"
        raise _BadYamlError(line, Problem(path, message, "a number within 64 bits, true or false"))
    return value


def _text(node: yaml.ScalarNode, path: KeyPath, line: int) -> str:
    text: str = node.value
    # YAML escapes can spell both; no command line or environment can hold them.
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        message = f"{show(text)} has a NUL character or half of a surrogate pair"
        raise _BadYamlError(line, Problem(path, message, "other text"))
    return text
