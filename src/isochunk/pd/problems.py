"""What is wrong with a topology file, and how it is said."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxdict = 8


class TopologyError(ValueError):
    """A topology file is wrong. The message has a line per problem.

    Args:
        lines: the problems, each naming the file, the line, the key, the value and what is valid.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Problem:
    """One mistake, or a warning.

    Args:
        path: keys and list positions that lead to it.
        message: what is wrong, starting with the value where there is one.
        valid: what would be valid.
    """

    path: KeyPath
    message: str
    valid: str = ""


def show(value: object) -> str:
    """A value for a message: its repr, shortened."""
    return _SHORT.repr(value)


def spell(path: KeyPath) -> str:
    """``("prefill", 0, "port")`` -> ``prefill[0].port``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "file"


def describe(file: str, lines: Mapping[KeyPath, int], problems: Iterable[Problem]) -> list[str]:
    """A line per problem, in the order of the file.

    Args:
        file: name of the file.
        lines: line of each key and list item in it.
        problems: the problems; a path that isn't in the file counts as its closest parent.
    """
    placed = []
    for problem in problems:
        path = problem.path
        while path and path not in lines:
            path = path[:-1]
        valid = f"; valid: {problem.valid}" if problem.valid else ""
        line = lines.get(path, 1)
        text = f"{spell(problem.path)}: {problem.message}{valid}"
        # Keys may hold anything, but a problem is one line.
        shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        placed.append((line, f"{file}:{line}: {shown}"))
    return [text for _, text in sorted(placed, key=lambda item: item[0])]
