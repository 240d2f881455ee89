"""The options of ``isochunk router`` and its process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from pydantic import ValidationError

from isochunk.pd.router import Address, RouterSettings
from isochunk.pd.router.command import parse_settings

DECODER = ["--decoder-ports", "8200"]


@pytest.mark.parametrize("spelling", ["--prefiller-port", "--prefiller-ports"])
def test_the_options_of_the_ascend_proxy(spelling: str) -> None:
    settings = parse_settings(
        ["--host", "0.0.0.0", "--port", "9000", "--prefiller-hosts", "10.0.0.1", "10.0.0.2"]
        + [spelling, "8100", "8101", "--decoder-hosts", "::1", "--decoder-ports", "8200"]
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
    settings = parse_settings(
        ["--prefiller-ports", "1", "2", "--prefiller-bootstrap-ports", "3", "4"]
        + ["--kv-connector", "mooncake", *DECODER]
    )
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


def test_the_process_serves_and_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        # Connections to this one stay unanswered: a request in flight for ever.
        prefiller = silent.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "isochunk.cli", "router", "--port", str(port)]
            + ["--prefiller-port", str(prefiller), "--decoder-port", "1"]
            + ["--health-timeout-s", "0.2", "--shutdown-timeout-s", "1"],
            env=os.environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline_s = time.monotonic() + 60
            health = None
            while health is None:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                try:
                    health = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                except httpx.TransportError:
                    time.sleep(0.05)
            assert health.status_code == 503
            assert health.json()["down"]["decode"] == ["127.0.0.1:1"]
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=10)
    assert process.returncode in (0, -signal.SIGTERM), log
