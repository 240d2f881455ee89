"""The launcher over small stand-in servers: no process is left behind, whatever happens."""

import asyncio
import os
import signal
import sys

import psutil
import pytest

from isochunk.pd.launcher import supervisor
from tests.unit.launcher.conftest import Launcher


def deployment(launcher: Launcher, *options: str) -> list[dict]:
    roles = (("prefill-0", "prefill"), ("decode-0", "decode"), ("router", "router"))
    return [launcher.job(name, role, *options) for name, role in roles]


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


def test_starts_reports_ready_last_and_stops_in_order(launcher: Launcher) -> None:
    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        assert len(launcher.alive()) == 9
        send(signal.SIGTERM)

    assert launcher.run(deployment(launcher), scenario) == 0
    order = ["prefill-0: healthy", "router: started", "router: healthy", "ready: everything"]
    order += ["SIGTERM: stopping", "router: exited with status 0"]
    order += ["decode-0: exited with status 0", "prefill-0: exited with status 0"]
    places = [launcher.text.index(line) for line in order]
    assert places == sorted(places)
    assert "prefill-0 | serving on" in launcher.text
    assert (launcher.directory / "logs" / "prefill-0.log").read_text().startswith("serving on")
    assert launcher.alive() == []


def test_server_that_ignores_sigterm_is_killed_after_the_grace_period(launcher: Launcher) -> None:
    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        send(signal.SIGINT)

    jobs = [launcher.job("decode-0", "decode", "ignore-sigterm")]
    assert launcher.run(jobs, scenario, shutdown_timeout_s=0.3) == 0
    assert "decode-0: was killed by SIGKILL" in launcher.text
    assert launcher.alive() == []


def test_second_signal_kills_at_once(launcher: Launcher) -> None:
    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        send(signal.SIGINT)
        await launcher.wait_for("SIGINT: stopping")
        send(signal.SIGINT)

    jobs = [launcher.job("decode-0", "decode", "ignore-sigterm")]
    assert launcher.run(jobs, scenario, shutdown_timeout_s=600) == 0
    assert launcher.alive() == []


def test_killed_launcher_takes_everything_with_it(launcher: Launcher) -> None:
    process = launcher.run_apart(deployment(launcher))
    assert process.stdout is not None
    assert any("ready: everything" in line for line in process.stdout)
    assert len(launcher.alive()) == 9
    process.kill()
    process.wait()
    process.stdout.close()
    asyncio.run(launcher.wait_for(lambda: launcher.alive() == []))


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_death_takes_the_deployment_down_and_names_the_instance(
    launcher: Launcher, name: str
) -> None:
    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        os.kill(launcher.started(name)[2], signal.SIGKILL)

    assert launcher.run(deployment(launcher), scenario) == 1
    assert f"{name} was killed by SIGKILL; its last lines:\n    serving on" in launcher.text
    assert launcher.alive() == []


def test_killed_keeper_counts_as_the_instance(launcher: Launcher) -> None:
    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        keeper = psutil.Process(launcher.started("decode-0")[2]).parent()
        assert keeper is not None
        keeper.kill()

    assert launcher.run(deployment(launcher), scenario) == 1
    assert "decode-0 was killed by SIGKILL" in launcher.text
    # What has left the process group of a killed keeper is out of reach.
    assert launcher.alive() == [launcher.started("decode-0")[1]]


def test_restart_brings_an_instance_back(launcher: Launcher) -> None:
    first: list[int] = []

    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        first.extend(launcher.started("decode-0"))
        os.kill(first[2], signal.SIGKILL)
        await launcher.wait_for(lambda: launcher.text.count("decode-0: healthy") == 2)
        assert set(launcher.started("decode-0")[3:]) <= set(launcher.alive())
        assert not set(first) & set(launcher.alive())
        send(signal.SIGTERM)

    policy = {"action": "restart", "backoff_s": 0.1}
    assert launcher.run(deployment(launcher), scenario, on_failure=policy) == 0
    assert "restarting it in 0.1 s" in launcher.text
    assert launcher.text.count("router: started") == 1
    assert launcher.alive() == []


def test_restarts_are_bounded_and_back_off(launcher: Launcher) -> None:
    trouble = launcher.directory / "trouble"

    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        trouble.touch()
        os.kill(launcher.started("decode-0")[2], signal.SIGKILL)

    jobs = [
        launcher.job("prefill-0", "prefill"),
        launcher.job("decode-0", "decode", f"fail-when:{trouble}"),
        launcher.job("decode-1", "decode"),
    ]
    policy = {"action": "restart", "max_restarts": 2, "backoff_s": 0.1}
    assert launcher.run(jobs, scenario, on_failure=policy) == 1
    assert "restarting it in 0.1 s" in launcher.text
    assert "restarting it in 0.2 s" in launcher.text
    assert "decode-0 exited with status 3" in launcher.text
    assert "no such weights" in launcher.text
    assert "after 2 restarts within 600 s; taking the deployment down" in launcher.text
    # The others are stopped, not taken for failed.
    down = launcher.text.rpartition("taking the deployment down")[2]
    assert "restarting" not in down
    assert "started" not in down
    assert launcher.alive() == []


def test_failure_at_start_stops_the_others(launcher: Launcher) -> None:
    jobs = [
        launcher.job("prefill-0", "prefill", "never-healthy"),
        launcher.job("decode-0", "decode", "fail"),
    ]
    assert launcher.run(jobs, on_failure={"action": "restart"}) == 1
    assert "decode-0 exited with status 3; its last lines:" in launcher.text
    assert "    no such weights" in launcher.text
    assert launcher.alive() == []


def test_startup_timeout_names_who_is_late(launcher: Launcher) -> None:
    jobs = [launcher.job("prefill-0", "prefill", "never-healthy")]
    assert launcher.run(jobs, startup_timeout_s=0.5) == 1
    assert "prefill-0 wasn't healthy within 0.5 s (startup_timeout_s)" in launcher.text
    assert launcher.alive() == []


def test_signal_during_startup_stops_soon(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_START_GRACE_S", 0.2)

    async def scenario() -> None:
        await launcher.wait_for(lambda: len(launcher.started("prefill-0")) == 3)
        send(signal.SIGTERM)

    jobs = [launcher.job("prefill-0", "prefill", "never-healthy", "ignore-sigterm")]
    assert launcher.run(jobs, scenario, shutdown_timeout_s=600) == 0
    assert "ready" not in launcher.text
    assert launcher.alive() == []


def test_calibration_runs_before_the_router_and_may_fail(launcher: Launcher) -> None:
    code = (
        "import sys; out = sys.stdout.buffer; out.write(b'model installed\\ncaf\\xe9\\n'); "
        "out.write(b'x' * 200_000 + b'\\nno end'); sys.exit(4)"
    )

    async def scenario() -> None:
        await launcher.wait_for("ready: everything")
        send(signal.SIGTERM)

    commands = {"prefill-0": [sys.executable, "-S", "-c", code]}
    jobs = [launcher.job("prefill-0", "prefill"), launcher.job("router", "router")]
    assert launcher.run(jobs, scenario, calibrations=commands) == 0
    order = ["| model installed", "| caf\ufffd\n", "| no end\n"]
    order += ["calibrate prefill-0: exited with status 4", "router: started"]
    places = [launcher.text.index(line) for line in order]
    assert places == sorted(places)


def test_waits_for_servers_on_other_nodes(launcher: Launcher) -> None:
    elsewhere = {"decode-1": f"http://127.0.0.1:{launcher.job('', '')['port']}/health"}
    jobs = deployment(launcher)
    assert launcher.run(jobs, elsewhere=elsewhere, startup_timeout_s=0.7) == 1
    assert "decode-1 wasn't healthy" in launcher.text
    assert "router: started" not in launcher.text
