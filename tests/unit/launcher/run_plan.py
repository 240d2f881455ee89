"""Runs a plan of stand-in servers as `isochunk up` does; also a script: run_plan.py PLAN.json."""

import asyncio
import json
import os
import sys
from pathlib import Path

from isochunk.pd.launcher.console import LogConsole
from isochunk.pd.launcher.jobs import Job, Plan
from isochunk.pd.launcher.supervisor import Supervisor
from isochunk.pd.topology import OnFailure

STAND_IN = str(Path(__file__).with_name("stand_in.py"))


def make_job(name: str, role: str, port: int, options: list[str]) -> Job:
    command = (sys.executable, "-S", "-E", STAND_IN, str(port), *options)
    return Job(name, role, command, dict(os.environ), f"http://127.0.0.1:{port}/health")


def make_plan(given: dict) -> Plan:
    jobs = [make_job(**job) for job in given["jobs"]]
    routers = [job for job in jobs if job.role == "router"]
    return Plan(
        servers=tuple(job for job in jobs if job.role != "router"),
        router=routers[0] if routers else None,
        elsewhere=given.get("elsewhere", {}),
        calibrations={
            name: Job(name, "calibrate", tuple(command), dict(os.environ), "")
            for name, command in given.get("calibrations", {}).items()
        },
        ready="ready: everything",
        on_failure=OnFailure(**given.get("on_failure", {})),
        startup_timeout_s=given.get("startup_timeout_s", 30.0),
        shutdown_timeout_s=given.get("shutdown_timeout_s", 10.0),
    )


async def run_plan(given: dict, log_directory: Path) -> int:
    plan = make_plan(given)
    console = LogConsole([job.name for job in plan.servers] + ["router"], log_directory)
    try:
        return await Supervisor(plan, console, poll_s=0.02).run()
    finally:
        console.close()


if __name__ == "__main__":
    plan_file = Path(sys.argv[1])
    sys.exit(asyncio.run(run_plan(json.loads(plan_file.read_text()), plan_file.parent / "logs")))
