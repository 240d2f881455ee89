"""Clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.router_upstreams import deployment, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def connect(port: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return reader, writer


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("where", ["prefill:hang", "decode:hang", "decode:hang_in_body"])
async def test_a_hundred_disconnects_leak_nothing(where: str, stream: bool) -> None:
    role, failure = where.split(":")
    body = json.dumps({"prompt": "hello " * 50, "stream": stream}).encode()
    async with deployment() as setup:
        await setup.client.post("/v1/completions", json={"prompt": "warm up"})
        upstream = setup.prefillers[0] if role == "prefill" else setup.decoders[0]
        upstream.fail = failure
        upstream.calls.clear()
        tasks_before = asyncio.all_tasks()
        clients = [await connect(setup.port, body) for _ in range(100)]
        await until(lambda: len(upstream.calls) == 100)
        in_flight = await setup.metric("isochunk_router_in_flight")
        assert in_flight[f"127.0.0.1:{upstream.port},{role}"] == 100
        for reader, writer in clients:
            if stream and failure == "hang_in_body":
                await reader.readuntil(b"t0")
            writer.transport.abort()
        await until(lambda: upstream.num_cancelled == 100)
        await setup.assert_quiet()
        await until(lambda: len(asyncio.all_tasks()) <= len(tasks_before))
        outcomes = await setup.metric("isochunk_router_requests_total")
        assert outcomes == {"ok": 1, "client_closed": 100}
        upstream.fail = ""
        answer = await setup.client.post("/v1/completions", json={"prompt": "still here"})
        assert answer.status_code == 200


async def test_a_client_that_leaves_while_uploading() -> None:
    async with deployment() as setup:
        _, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        outcomes: dict[str, float] = {}
        async with asyncio.timeout(5):
            while outcomes != {"client_closed": 1}:
                outcomes = await setup.metric("isochunk_router_requests_total")
        assert setup.num_calls() == ([0], [0])
