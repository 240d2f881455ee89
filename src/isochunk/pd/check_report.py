"""What ``isochunk up --check`` prints: a shell script of what would run, node by node."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from isochunk.pd.commands import Part, calibrations, make_parts
from isochunk.pd.placement import get_nodes
from isochunk.pd.topology_file import Deployment


def describe_deployment(deployment: Deployment, node: str | None = None) -> str:
    """The commands of all nodes, or of one; each can be copied into a shell."""
    parts = make_parts(deployment)
    nodes = get_nodes(deployment.topology)
    sections = []
    for name in [node] if node else nodes:
        title = f"# node {name} ({nodes[name].host})"
        own = [part for part in parts if part.node == name]
        sections.append("\n\n".join([title, *(_describe_part(part) for part in own)]))
        if any(part.role == "router" for part in own):
            sections += [
                f"# before it reports ready: calibrate {server}\n{format_command(argv)}"
                for server, argv in calibrations(deployment).items()
            ]
    return "\n\n".join(sections) + "\n"


def _describe_part(part: Part) -> str:
    title = f"# {part.name}" + (f": {part.about}" if part.about != part.name else "")
    return f"{title}\n{format_command(part.argv, part.env)}"


def format_command(argv: Sequence[str], env: dict[str, str | None] | None = None) -> str:
    """A command with its environment, a flag and its values on each line."""
    lines = list(_environment(env or {}))
    lines.append("isochunk " + " ".join(shlex.quote(arg) for arg in _leading(argv)))
    for arg in argv[len(_leading(argv)) :]:
        if arg.startswith("-"):
            lines.append("  " + shlex.quote(arg))
        else:
            lines[-1] += " " + shlex.quote(arg)
    return " \\\n".join(lines)


def _environment(env: dict[str, str | None]) -> Iterator[str]:
    removed = [f"-u {name}" for name, value in env.items() if value is None]
    if removed:
        yield "env " + " ".join(removed)
    for name, value in env.items():
        if value is not None:
            yield f"{name}={shlex.quote(value)}"


def _leading(argv: Sequence[str]) -> Sequence[str]:
    flags = (i for i, arg in enumerate(argv) if arg.startswith("-"))
    return argv[: next(flags, len(argv))]
