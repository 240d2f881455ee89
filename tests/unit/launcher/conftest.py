"""The launcher over stand-in servers, in this process, and what became of them."""

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from isochunk.demo.server import free_port
from tests.unit.launcher.run_plan import run_plan

DEADLINE_S = 30.0
Scenario = Callable[[], Awaitable[None]]


class Launcher:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pids = directory / "pids"
        self.pids.mkdir()
        self.output = io.StringIO()

    @property
    def text(self) -> str:
        return self.output.getvalue()

    def job(self, name: str, role: str, *options: str) -> dict:
        given = [str(self.pids / name), *options]
        return {"name": name, "role": role, "port": free_port(), "options": given}

    def run(self, jobs: list[dict], scenario: Scenario | None = None, **settings: object) -> int:
        """Run until the scenario has stopped it, or it ends; returns its status."""

        async def both() -> int:
            launcher = asyncio.create_task(
                run_plan({"jobs": jobs, **settings}, self.directory / "logs")
            )
            if scenario is not None:
                await scenario()
            return await asyncio.wait_for(launcher, DEADLINE_S)

        with contextlib.redirect_stdout(self.output):
            return asyncio.run(both())

    async def wait_for(self, what: str | Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if what() if callable(what) else what in self.text:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{what} didn't come about; output:\n{self.text}")

    def run_apart(self, jobs: list[dict]) -> subprocess.Popen[str]:
        """Run in a process of its own."""
        plan = self.directory / "plan.json"
        plan.write_text(json.dumps({"jobs": jobs}))
        command = [sys.executable, "-m", "tests.unit.launcher.run_plan", str(plan)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def started(self, name: str) -> list[int]:
        """Process ids of a stand-in: worker, worker in its own session, server; and so on."""
        file = self.pids / name
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def alive(self) -> list[int]:
        pids = [pid for file in self.pids.iterdir() for pid in self.started(file.name)]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    # A test run in the background may have begun with ignored signals, which the launcher
    # would leave ignored.
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(signum, signal.SIG_DFL) for signum in stops]
    yield found
    for signum, handler in zip(stops, before, strict=True):
        signal.signal(signum, handler)
    for pid in found.alive():
        os.kill(pid, signal.SIGKILL)
