"""What the launcher has to run on one node."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from isochunk.pd.commands import Part, calibrations, make_parts, router_url
from isochunk.pd.topology import OnFailure
from isochunk.pd.topology_file import Deployment


@dataclass(frozen=True)
class Job:
    """A process to start.

    Args:
        name: unique.
        role: "prefill", "decode" or "router".
        command: program and arguments.
        env: the whole environment.
        health_url: answers 200 once it serves.
        can_restart: whether it can come back alone, without parts on other nodes.
    """

    name: str
    role: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(hash=False)
    health_url: str
    can_restart: bool = True


@dataclass(frozen=True)
class Plan:
    """All that runs on a node.

    Args:
        servers: vLLM servers.
        router: the router, if it runs here.
        elsewhere: server -> health URL, of those on other nodes that the router waits for.
        calibrations: server -> job that calibrates it before the router starts.
        ready: the line that says so.
        on_failure: what follows a death.
        startup_timeout_s: for the servers, and then the router, to become healthy [s].
        shutdown_timeout_s: until a process that was asked to stop is killed [s].
    """

    servers: tuple[Job, ...]
    router: Job | None
    elsewhere: Mapping[str, str]
    calibrations: Mapping[str, Job]
    ready: str
    on_failure: OnFailure
    startup_timeout_s: float
    shutdown_timeout_s: float


def make_plan(deployment: Deployment, nodes: Sequence[str]) -> Plan:
    """What runs on these nodes, all of which are this machine."""
    topology = deployment.topology
    *servers, router = make_parts(deployment)
    here = [part for part in servers if part.node in nodes]
    envs = {part.name: part.env for part in servers}  # a server's first part has its name
    num_nodes = {server.name: len(server.nodes) for server in deployment.servers}
    jobs = tuple(_make_job(part, can_restart=num_nodes.get(part.name, 2) == 1) for part in here)
    if router.node not in nodes:
        ready = f"up on {', '.join(nodes)}: {', '.join(job.name for job in jobs)}"
    else:
        ready = f"ready: {router_url(topology, deployment.servers)}"
    is_here = router.node in nodes
    return Plan(
        servers=jobs,
        router=_make_job(router) if is_here else None,
        elsewhere={p.name: p.health_url for p in servers if is_here and p.node not in nodes},
        calibrations={
            name: Job(name, "calibrate", _command(argv), _environment(_api_key(envs[name])), "")
            for name, argv in (calibrations(deployment) if is_here else {}).items()
        },
        ready=ready,
        on_failure=topology.on_failure,
        startup_timeout_s=topology.startup_timeout_s,
        shutdown_timeout_s=topology.shutdown_timeout_s,
    )


def _api_key(env: Mapping[str, str | None]) -> dict[str, str | None]:
    """The key that a server asks for, as a variable."""
    return {name: value for name, value in env.items() if name == "VLLM_API_KEY"}


def _make_job(part: Part, can_restart: bool = True) -> Job:
    return Job(
        part.name,
        part.role,
        _command(part.argv),
        _environment(part.env),
        part.health_url,
        can_restart,
    )


def _command(argv: Sequence[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "isochunk.cli", *argv)


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    # Servers must not share a directory of metrics; `isochunk serve` makes one for each.
    unset = {"PROMETHEUS_MULTIPROC_DIR"} | {k for k, v in changes.items() if v is None}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    return env | {name: value for name, value in changes.items() if value is not None}
