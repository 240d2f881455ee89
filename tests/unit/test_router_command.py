"""The options of ``isochunk router`` and its process."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from pydantic import ValidationError

from isochunk.pd.router.command import parse_settings
from isochunk.pd.router.settings import Address, RouterSettings
from tests.unit.router_upstreams import Upstream, until

DECODER = ["--decoder-ports", "8200"]


@pytest.mark.parametrize("spelling", ["--prefiller-port", "--prefiller-ports"])
def test_the_options_of_the_ascend_proxy(spelling: str) -> None:
    settings = parse_settings(
        "--host 0.0.0.0 --port 9000 --prefiller-hosts 10.0.0.1 10.0.0.2 "
        f"{spelling} 8100 8101 --decoder-hosts ::1 --decoder-ports 8200".split()
    )
    assert [a.url for a in settings.prefillers] == ["http://10.0.0.1:8100", "http://10.0.0.2:8101"]
    assert [a.url for a in settings.decoders] == ["http://[::1]:8200"]
    assert (settings.host, settings.port) == ("0.0.0.0", 9000)


def test_defaults() -> None:
    settings = parse_settings(["--prefiller-port", "8100", *DECODER])
    assert settings == RouterSettings(
        prefillers=(Address(host="127.0.0.1", port=8100),),
        decoders=(Address(host="127.0.0.1", port=8200),),
    )
    assert settings.host == "127.0.0.1"


def test_mooncake_bootstrap_ports() -> None:
    ports = ["--prefiller-ports", "1", "2", "--prefiller-bootstrap-ports", "3", "4", *DECODER]
    settings = parse_settings(["--kv-connector", "mooncake", *ports])
    assert [a.bootstrap_url for a in settings.prefillers] == [
        "http://127.0.0.1:3",
        "http://127.0.0.1:4",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (DECODER, ["--prefiller-ports"]),
        (["--prefiller-ports", "8100"], ["--decoder-ports"]),
        (["--prefiller-hosts", "a", "b", "--prefiller-ports", "1", *DECODER], ["a b", "one port"]),
        (["--prefiller-ports", "70000", *DECODER], ["--prefiller-ports", "70000", "65535"]),
        (["--prefiller-ports", "x", *DECODER], ["--prefiller-ports", "x", "65535"]),
        (["--prefiller-ports", "0", *DECODER], ["--prefiller-ports", "0", "65535"]),
        (["--prefiller-hosts", "http://a", "--prefiller-ports", "1", *DECODER], ["http://a"]),
        (["--prefiller-ports", "8200", *DECODER], ["127.0.0.1:8200", "more than once"]),
        (["--prefiller-ports", "8000", *DECODER], ["127.0.0.1:8000", "router itself"]),
        (["--prefiller-ports", "1", "--kv-connector", "z", *DECODER], ["'z'", "mooncake"]),
        (
            ["--prefiller-ports", "1", "--prefill-timeout-s", "-1", *DECODER],
            ["--prefill-timeout-s -1", "greater than 0"],
        ),
        (
            ["--prefiller-ports", "1", "--prefiller-bootstrap-ports", "3", "4", *DECODER],
            ["--prefiller-bootstrap-ports", "3 4"],
        ),
        (["--prefiller-ports", "1", "--nonsense", *DECODER], ["--nonsense"]),
    ],
)
def test_wrong_options(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(word in message for word in words), message


def test_settings_need_both_roles() -> None:
    with pytest.raises(ValidationError, match="decoders"):
        RouterSettings(prefillers=(Address(host="a", port=1),), decoders=())


@pytest.mark.anyio
async def test_the_process_ends_in_time_with_a_request_in_flight() -> None:
    prefiller, decoder = Upstream("p"), Upstream("d", fail="hang_in_body")
    await prefiller.start()
    await decoder.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "isochunk.cli", "router", "--port", str(port)),
        *("--prefiller-port", str(prefiller.port), "--decoder-port", str(decoder.port)),
        *("--shutdown-timeout-s", "1"),
        stderr=subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
        async with asyncio.timeout(60):
            while True:
                assert process.returncode is None
                try:
                    assert (await client.get("/health")).status_code == 200
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        body = {"prompt": "hello", "stream": True}
        flight = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(decoder.calls) == 1)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            _, log = await process.communicate()
        assert process.returncode == -signal.SIGTERM, log.decode()
        with pytest.raises(httpx.RemoteProtocolError):
            await flight
        await until(lambda: decoder.num_cancelled == 1)
    await prefiller.stop()
    await decoder.stop()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
