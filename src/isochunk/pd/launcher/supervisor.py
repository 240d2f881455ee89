"""Starts what a plan says, waits until it is healthy, keeps it running, takes it down."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping

import httpx

from isochunk.pd.launcher.console import LogConsole
from isochunk.pd.launcher.jobs import Job, Plan
from isochunk.pd.launcher.process import ManagedProcess, describe_status

_CALIBRATION_TIMEOUT_S = 1800.0
_STOP_ORDER = ("calibrate", "router", "decode", "prefill")
_PROBE_TIMEOUT_S = 5.0
# vLLM doesn't heed SIGTERM while it loads, and there is nothing to finish then.
_START_GRACE_S = 5.0


class DeploymentFailedError(RuntimeError):
    """The deployment can't go on; the message says which process and why."""


class Supervisor:
    """Runs a plan from start to end.

    Args:
        plan: what runs here.
        console: for what there is to say.
        poll_s: time between health probes [s].
    """

    def __init__(self, plan: Plan, console: LogConsole, poll_s: float = 0.25) -> None:
        self._plan, self._console, self._poll_s = plan, console, poll_s
        self._running: dict[str, tuple[Job, ManagedProcess, asyncio.Task[int]]] = {}
        self._restarts: dict[str, deque[float]] = {}
        self._client = httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S, trust_env=False)
        self._stop = asyncio.Event()
        self._is_ready = False

    async def run(self) -> int:
        """Run until stopped by a signal (returns 0) or a failure (returns 1)."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(signum, self._on_signal, signum)
        serving = asyncio.create_task(self._serve())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                return 0
            serving.result()
        except DeploymentFailedError as error:
            self._console.say(f"{error}; taking the deployment down")
            return 1
        finally:
            serving.cancel()
            stopped.cancel()
            await asyncio.gather(serving, stopped, return_exceptions=True)
            self._console.end_waiting()
            await self._shut_down()
            await self._client.aclose()
        return 0

    def _on_signal(self, signum: signal.Signals) -> None:
        if not self._stop.is_set():
            self._console.say(f"{signum.name}: stopping (again to kill)")
            self._stop.set()
            return
        self._console.say(f"{signum.name}: killing everything")
        for _, process, _ in self._running.values():
            process.kill()

    async def _serve(self) -> None:
        plan = self._plan
        for job in plan.servers:
            await self._start(job)
        urls = {job.name: job.health_url for job in plan.servers}
        await self._wait_until_healthy({**urls, **plan.elsewhere})
        for job in plan.calibrations.values():
            await self._unless_one_ends(self._calibrate(job))
        if plan.router is not None:
            await self._start(plan.router)
            await self._wait_until_healthy({"router": plan.router.health_url})
        self._is_ready = True
        self._console.announce(plan.ready)
        await _all([self._keep_running(name) for name in list(self._running)])

    async def _start(self, job: Job) -> None:
        grace_s = self._plan.shutdown_timeout_s
        process = ManagedProcess(job.name, job.command, job.env, grace_s, self._console.log)
        await process.start()
        key = job.name if job.role != "calibrate" else f"calibrate {job.name}"
        self._running[key] = (job, process, asyncio.create_task(process.wait()))
        self._console.say(f"{key}: started, process group {process.pid}")

    async def _wait_until_healthy(self, urls: Mapping[str, str]) -> None:
        self._console.begin_waiting(list(urls))
        try:
            async with asyncio.timeout(self._plan.startup_timeout_s):
                probes = [self._probe(name, url) for name, url in urls.items()]
                await self._unless_one_ends(_all(probes))
        except TimeoutError:
            late = [name for name, url in urls.items() if not await self._is_healthy(url)]
            raise DeploymentFailedError(
                f"{', '.join(late) or 'a server'} wasn't healthy within "
                f"{self._plan.startup_timeout_s:g} s (startup_timeout_s)"
            ) from None
        finally:
            self._console.end_waiting()

    async def _probe(self, name: str, url: str) -> None:
        start = time.monotonic()
        while not await self._is_healthy(url):
            await asyncio.sleep(self._poll_s)
        self._console.show_step(name, "healthy")
        self._console.say(f"{name}: healthy after {time.monotonic() - start:.1f} s")

    async def _is_healthy(self, url: str) -> bool:
        try:
            return (await self._client.get(url)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _unless_one_ends(self, work: Awaitable[None], names: Iterable[str] = ()) -> None:
        """Await ``work``; fails if one of the processes (by default any) ends before."""
        ends = {name: self._running[name][2] for name in names or self._running}
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, *ends.values()}, return_when=asyncio.FIRST_COMPLETED)
            for name, end in ends.items():
                if end.done():
                    raise DeploymentFailedError(self._explain_end(name))
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _explain_end(self, name: str) -> str:
        _, process, end = self._running[name]
        lines = "".join(f"\n    {line}" for line in process.last_lines)
        shown = f"; its last lines:{lines}\n" if lines else " without a word"
        return f"{name} {describe_status(end.result())}{shown}"

    async def _calibrate(self, job: Job) -> None:
        await self._start(job)
        key = f"calibrate {job.name}"
        _, process, end = self._running[key]
        try:
            async with asyncio.timeout(_CALIBRATION_TIMEOUT_S):
                status = await asyncio.shield(end)
        except TimeoutError:
            status = 1
        finally:
            if not end.done():
                await process.stop()
            del self._running[key]
        if status:
            message = f"{key}: {describe_status(status)}; its chunks stay as they are"
            self._console.say(message)

    async def _keep_running(self, name: str) -> None:
        """Restart a process whenever it ends.

        Raises:
            DeploymentFailedError: it ended and must or can not be restarted.
        """
        while True:
            job, _, end = self._running[name]
            await asyncio.shield(end)
            message = self._explain_end(name)
            if not self._may_restart(job):
                raise DeploymentFailedError(message + self._why_not(job))
            delay_s = self._plan.on_failure.backoff_s * 2 ** (len(self._restarts[name]) - 1)
            self._console.say(f"{message}; restarting it in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await self._start(job)
            await self._recover(job)

    def _may_restart(self, job: Job) -> bool:
        policy, now = self._plan.on_failure, time.monotonic()
        if policy.action == "stop" or not job.can_restart:
            return False
        recent = self._restarts.setdefault(job.name, deque())
        while recent and now - recent[0] > policy.within_s:
            recent.popleft()
        recent.append(now)
        return len(recent) <= policy.max_restarts

    def _why_not(self, job: Job) -> str:
        policy = self._plan.on_failure
        if policy.action == "stop":
            return ""
        if not job.can_restart:
            return ", and it can't restart without its parts on other nodes"
        return f", after {policy.max_restarts} restarts within {policy.within_s:g} s"

    async def _recover(self, job: Job) -> None:
        """Wait until a restarted process is healthy; end it if it takes too long."""
        try:
            async with asyncio.timeout(self._plan.startup_timeout_s):
                probe = self._probe(job.name, job.health_url)
                await self._unless_one_ends(probe, [job.name])
            if job.name in self._plan.calibrations:
                calibration = self._calibrate(self._plan.calibrations[job.name])
                await self._unless_one_ends(calibration, [job.name])
        except TimeoutError:
            self._console.say(f"{job.name}: not healthy within startup_timeout_s after its restart")
            await self._running[job.name][1].stop()
        except DeploymentFailedError:
            pass  # it ended again, which _keep_running sees

    async def _shut_down(self) -> None:
        """Stop the router, then decode, then prefill; before it serves, all at once and soon."""
        order = [(role,) for role in _STOP_ORDER] if self._is_ready else [_STOP_ORDER]
        grace_s = None if self._is_ready else _START_GRACE_S
        for roles in order:
            mine = [run for run in self._running.values() if run[0].role in roles]
            await asyncio.gather(*(process.stop(grace_s) for _, process, _ in mine))
            for job, _, end in mine:
                self._console.say(f"{job.name}: {describe_status(await end)}")


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Await all; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
