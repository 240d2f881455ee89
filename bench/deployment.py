"""A whole deployment on this machine: right answers, failures, disconnects, nothing leaked.

    python -m bench.deployment [--requests 200] [--part answers|failures|disconnects …]

Runs ``isochunk up`` on examples/cpu-1p1d.yaml (prefill with two stages and dynamic chunking,
decode with one, router). The right answers come from one plain server with one stage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import yaml

from bench.deployment_load import (
    Ask,
    Outcome,
    check,
    disconnect_all,
    gauges,
    make_asks,
    send_all,
)
from isochunk.demo.models import make_toy_model
from isochunk.demo.server import VllmServer, cpu_env

EXAMPLE = Path(__file__).parents[1] / "examples" / "cpu-1p1d.yaml"
CONCURRENCY = 16
MODEL = "toy"
CLAIM_TIMEOUT_S = 10.0
RUNNING = "vllm:num_requests_running"
PARTS = ("answers", "failures", "disconnects")


@contextmanager
def deployment(file: Path, log: Path) -> Iterator[str]:
    """``isochunk up FILE``; yields the router's address once it is ready."""
    command = [sys.executable, "-m", "isochunk.cli", "up", str(file)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 900
        while "\nready: " not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"isochunk up isn't ready: {log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield log.read_text(errors="replace").rpartition("\nready: ")[2].split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)


def servers(file: Path) -> dict[str, str]:
    """Role -> address."""
    topology = yaml.safe_load(file.read_text())
    return {r: f"http://127.0.0.1:{topology[r][0]['port']}" for r in ("prefill", "decode")}


def left_over(url: str, roles: dict[str, str]) -> list[str]:
    """What is still counted or held, once nothing should be; waits for the claim timeout."""
    deadline = time.monotonic() + 3 * CLAIM_TIMEOUT_S
    while True:
        found = []
        for name in ("in_flight", "tokens_in_flight", "predicted_prefill_ms"):
            values = gauges(url, f"isochunk_router_{name}")
            if not values or any(values):
                found.append(f"router {name} {values}")
        for role, address in roles.items():
            for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
                values = gauges(address, f"vllm:{name}")
                if not values or any(values):
                    found.append(f"{role} {name} {values}")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def kill_server(address: str) -> int:
    """SIGKILL to the server that listens there and all its processes; returns how many."""
    port = int(address.rpartition(":")[2])
    owners = {
        c.pid
        for c in psutil.net_connections("tcp")
        if c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid is not None
    }
    killed = 0
    for pid in owners:
        server = psutil.Process(pid)
        for process in [*server.children(recursive=True), server]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
    return killed


def kill_in_mid_run(
    url: str, address: str, asks: Sequence[Ask], num_running: int
) -> tuple[list[Outcome], float]:
    """Send all at once; kill a server as soon as it runs so many; outcomes, and when that was."""

    async def run() -> tuple[list[Outcome], float]:
        sending = asyncio.ensure_future(send_all(url, MODEL, asks, len(asks)))
        while sum(await asyncio.to_thread(gauges, address, RUNNING)) < num_running:
            assert not sending.done(), (
                f"{address} never ran {num_running} requests at a time: {sending.result()}"[:3000]
            )
            await asyncio.sleep(0.05)
        killed_at = time.monotonic()
        assert kill_server(address) > 0, f"no server listens at {address}"
        return await sending, killed_at

    return asyncio.run(run())


def wait_until_healthy(url: str, timeout_s: float = 600.0) -> float:
    """Seconds until the router says that both roles are up."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return time.monotonic() - start
        time.sleep(0.5)
    raise RuntimeError(f"the deployment didn't recover within {timeout_s:g} s")


def run_failures(url: str, roles: dict[str, str], expected: dict[Ask, Outcome]) -> bool:
    """Kill each role while 16 requests are in flight; then all must work again."""
    is_good = True
    for role in ("decode", "prefill"):
        if role == "decode":  # short prompts that decode for long
            asks = make_asks(CONCURRENCY, lengths=(16, 256), max_tokens=1024, seed=5)
        else:  # long prompts
            asks = make_asks(CONCURRENCY, lengths=(3000, 4096), seed=6)
        outcomes, killed_at = kill_in_mid_run(url, roles[role], asks, num_running=2)
        failed = [o for o in outcomes if o.error]
        waits = [o.ended_at - killed_at for o in failed]
        print(
            f"kill -9 of {role} with {len(asks)} requests under way: {len(failed)} errors, "
            f"the last after {max(waits, default=0):.1f} s, {len(asks) - len(failed)} complete"
        )
        for text, count in Counter(o.error for o in failed).most_common(4):
            print(f"    {count} x {text[:150]}")
        recovery_s = wait_until_healthy(url)
        again = list(expected)[:CONCURRENCY]
        wrong = check(
            again,
            asyncio.run(send_all(url, MODEL, again, CONCURRENCY)),
            [expected[ask] for ask in again],
        )
        rest = left_over(url, roles)
        print(
            f"    healthy again after {recovery_s:.0f} s; then {len(again) - len(wrong)} of "
            f"{len(again)} answers right; left over: {rest or 'nothing'}"
        )
        is_good &= bool(failed) and max(waits) < 10 and not wrong and not rest
    return is_good


def report(parts: Sequence[str], num_requests: int, folder: Path) -> bool:
    """Run the parts, print what came of them; whether all is well."""
    model = make_toy_model(folder / "toy", distinct_tokens=True)
    topology = yaml.safe_load(EXAMPLE.read_text())
    topology |= {
        "model": str(model),
        "served_model_name": MODEL,
        "on_failure": "restart",
    }
    topology["kv_transfer"]["extra_config"] = {"claim_timeout_s": CLAIM_TIMEOUT_S}
    file = folder / "cpu-1p1d.yaml"
    file.write_text(yaml.safe_dump(topology))
    roles = servers(file)

    asks = make_asks(num_requests)
    args = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "8192"]
    args += ["--served-model-name", MODEL]
    with VllmServer(model, args, folder / "plain.log", cpu_env(num_stages=1)) as plain:
        plain.wait_until_healthy(600)
        start = time.monotonic()
        answers = asyncio.run(send_all(plain.url, MODEL, asks, CONCURRENCY))
        plain_s = time.monotonic() - start
    assert not check(asks, answers, answers)
    expected = dict(zip(asks, answers, strict=True))
    num_distinct = len({o.tokens for o in answers})
    print(
        f"one plain server: {num_requests} requests of 16–4096 tokens, "
        f"{sum(len(a.prompt) for a in asks)} prompt tokens in all, {plain_s:.0f} s; "
        f"{num_distinct} different answers"
    )
    is_good = True
    with deployment(file, folder / "up.log") as url:
        if "answers" in parts:
            start = time.monotonic()
            outcomes = asyncio.run(send_all(url, MODEL, asks, CONCURRENCY))
            wrong = check(asks, outcomes, answers)
            rest = left_over(url, roles)
            print(
                f"deployment: {len(asks) - len(wrong)} of {len(asks)} complete and equal "
                f"({sum(a.is_stream for a in asks)} streamed), concurrency {CONCURRENCY}, "
                f"{time.monotonic() - start:.0f} s; left over: {rest or 'nothing'}"
            )
            for line in wrong[:5]:
                print(f"    {line[:200]}")
            is_good &= not wrong and not rest
        if "disconnects" in parts:
            gone = make_asks(100, lengths=(64, 2048), max_tokens=64, seed=9)
            cut = asyncio.run(disconnect_all(url, MODEL, gone, CONCURRENCY))
            rest = left_over(url, roles)
            print(f"{cut} of 100 clients hung up under way; left over: {rest or 'nothing'}")
            is_good &= cut > 50 and not rest
        if "failures" in parts:
            is_good &= run_failures(url, roles, expected)
    text = (folder / "up.log").read_text(errors="replace")
    print(f"stopped; last line of the launcher: {text.strip().splitlines()[-1]}")
    return is_good


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--part", action="append", choices=PARTS)
    given = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    with tempfile.TemporaryDirectory() as folder:
        is_good = report(given.part or PARTS, given.requests, Path(folder))
    print("all as it should be" if is_good else "NOT as it should be")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
