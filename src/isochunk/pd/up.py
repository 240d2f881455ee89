"""The ``isochunk up`` command."""

from __future__ import annotations

import asyncio
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from isochunk.pd.check_report import describe_deployment
from isochunk.pd.commands import BUILT_IN_MODELS, model_path
from isochunk.pd.launcher.console import LogConsole
from isochunk.pd.launcher.jobs import Plan, make_plan
from isochunk.pd.launcher.supervisor import Supervisor
from isochunk.pd.placement import get_nodes
from isochunk.pd.ports import find_busy, is_local, list_port_uses
from isochunk.pd.problems import TopologyError
from isochunk.pd.topology_file import Deployment, load_topology


def up(
    file: Annotated[Path, typer.Argument(help="Topology file (YAML); see docs/deployments.md.")],
    *,
    node: Annotated[str | None, typer.Option(help="Run this node's part only.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Print what would run.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Also write a log file per process.")] = None,
) -> None:
    """Start a prefill-decode deployment from one file: vLLM servers and the router."""
    try:
        deployment = load_topology(file)
    except TopologyError as error:
        _fail(str(error))
    for warning in deployment.warnings:
        typer.echo(f"warning: {warning}", err=True)
    nodes = get_nodes(deployment.topology)
    if node is not None and node not in nodes:
        _fail(f"--node {node}: not in {file.name}; valid: {', '.join(nodes)}")
    if check:
        _print_script(describe_deployment(deployment, node))
        return
    if node is None and not all(is_local(n.host) for n in nodes.values()):
        _fail(f"{file.name} has nodes on several machines: give one of --node {' | '.join(nodes)}")
    here = [node] if node else list(nodes)
    uses = list_port_uses(deployment.topology, deployment.servers)
    busy = find_busy(use for use in uses if use.node in here)
    if busy:
        _fail("\n".join(busy))
    _make_built_in_model(deployment)
    sys.exit(_run(make_plan(deployment, here), log_dir))


def _run(plan: Plan, log_directory: Path | None) -> int:
    names = [job.name for job in plan.servers] + (["router"] if plan.router else [])
    console = LogConsole(names, log_directory)
    try:
        return asyncio.run(_supervise(plan, console))
    finally:
        console.close()


async def _supervise(plan: Plan, console: LogConsole) -> int:
    return await Supervisor(plan, console).run()


def _make_built_in_model(deployment: Deployment) -> None:
    name = deployment.topology.model
    if name not in BUILT_IN_MODELS:
        return
    # In a process of its own: torch needn't stay in this one.
    path = Path(model_path(deployment.topology))
    maker = get_context("spawn").Process(target=_make_model, args=(name, path))
    maker.start()
    maker.join()
    if maker.exitcode:
        _fail(f"the model {name} could not be made at {path}")


def _make_model(name: str, path: Path) -> None:
    from isochunk.demo.models import make_smollm2, make_toy_model  # noqa: PLC0415  (heavy)

    if name == "toy":
        make_toy_model(path, distinct_tokens=True)
    else:
        make_smollm2(path)


def _print_script(script: str) -> None:
    console = Console()
    for line in script.splitlines():
        # Wrapped by the terminal alone: what is copied is one line.
        console.print(Text(line, style="cyan" if line.startswith("#") else ""), soft_wrap=True)


def _fail(message: str) -> NoReturn:
    typer.echo("\n".join(f"error: {line}" for line in message.splitlines()), err=True)
    raise typer.Exit(2)
