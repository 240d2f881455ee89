"""``isochunk up`` with real servers: prefill with two stages, decode with one, router."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.deployment import kill_in_mid_run, left_over, servers
from bench.deployment_load import check, disconnect_all, gauges, make_asks, send_all
from isochunk.demo.server import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpu-1p1d.yaml"
MODEL = "toy"


class Deployment:
    """A running ``isochunk up``."""

    def __init__(self, file: Path, log: Path) -> None:
        self.roles = servers(file)
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "isochunk.cli", "up", str(file)],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.url = ""

    def wait_until_ready(self, timeout_s: float = 400.0) -> None:
        deadline = time.monotonic() + timeout_s
        while "\nready: " not in self.text:
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < deadline, self.text[-3000:]
            time.sleep(0.25)
        self.url = self.text.rpartition("\nready: ")[2].split()[0]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def deployment(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    topology: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    topology |= {"model": str(toy), "served_model_name": MODEL}
    # The engine tests' own settings for engines in this process don't concern the servers.
    topology["env"] |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    topology["args"]["chat-template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    topology["kv_transfer"]["extra_config"] = {"claim_timeout_s": 5}
    for role in ("prefill", "decode"):
        topology[role][0]["port"] = free_port()
    # The decode server then computes a prompt anew when it is asked directly.
    topology["decode"][0]["args"] = {"enable-prefix-caching": False}
    topology["router"] = {"port": free_port()}
    file = folder / "deploy.yaml"
    file.write_text(yaml.safe_dump(topology))
    running = Deployment(file, folder / "up.log")
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(timeout=90)


def test_answers_equal_those_of_one_plain_server(deployment: Deployment) -> None:
    asks = make_asks(24, lengths=(16, 3000), seed=1)
    outcomes = asyncio.run(send_all(deployment.url, MODEL, asks, 8))
    # Asked without the router, the decode server is a plain one with a single stage.
    expected = asyncio.run(send_all(deployment.roles["decode"], MODEL, asks, 8))
    assert check(asks, outcomes, expected) == []
    assert len({o.tokens for o in outcomes}) > 12
    # The prefills did take place on the other side.
    assert gauges(deployment.url, "isochunk_router_untransferred_total") == []
    assert left_over(deployment.url, deployment.roles) == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_chats_are_answered_as_by_one_plain_server(deployment: Deployment, is_stream: bool) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "long ago, far away " * (20 + is_stream)}],
        "max_completion_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_stream,
    }
    answers = []
    for url in (deployment.url, deployment.roles["decode"]):
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        if not is_stream:
            answer = response.json()
            assert answer["usage"]["completion_tokens"] == 12
            answers.append(answer["choices"][0]["message"]["content"])
            continue
        lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        answers.append("".join(deltas))
    assert answers[0] == answers[1] != ""


def test_repeated_prompts_use_the_prefix_cache_of_the_prefill(deployment: Deployment) -> None:
    asks = make_asks(4, lengths=(600, 900), seed=2)
    first = asyncio.run(send_all(deployment.url, MODEL, asks, 2))
    again = asyncio.run(send_all(deployment.url, MODEL, asks, 2))
    assert check(asks, again, first) == []


def test_a_refusal_reaches_the_client_as_it_is(deployment: Deployment) -> None:
    body = {"model": MODEL, "prompt": [300] * 9000, "max_tokens": 4}
    direct = httpx.post(f"{deployment.roles['prefill']}/v1/completions", json=body)
    routed = httpx.post(f"{deployment.url}/v1/completions", json=body)
    assert routed.status_code == direct.status_code == 400
    assert routed.json() == direct.json()


def test_clients_that_hang_up_leave_nothing_behind(deployment: Deployment) -> None:
    asks = make_asks(30, lengths=(64, 2000), max_tokens=64, seed=3)
    assert asyncio.run(disconnect_all(deployment.url, MODEL, asks, 10)) > 10
    assert left_over(deployment.url, deployment.roles) == []


def test_a_killed_server_fails_its_requests_soon_and_takes_the_deployment_down(
    deployment: Deployment,
) -> None:  # the last one: on_failure is "stop"
    # Answers that take a minute or more: none is complete by then, on any machine.
    asks = make_asks(8, lengths=(16, 256), max_tokens=7000, seed=4)
    outcomes, killed_at = kill_in_mid_run(
        deployment.url, deployment.roles["decode"], asks, num_running=1
    )
    assert [len(outcome.tokens) for outcome in outcomes if not outcome.error] == []
    assert max(outcome.ended_at for outcome in outcomes) - killed_at < 10
    assert deployment.process.wait(timeout=90) == 1
    assert "decode-0" in deployment.text.rpartition("\nready: ")[2]
