"""Clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.router_upstreams import Deployment, deployment, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def leave(setup: Deployment, stream: bool, where: str) -> None:
    """Send a request and drop the connection once it is at ``where``."""
    role, failure = where.split(":")
    upstream = setup.prefillers[0] if role == "prefill" else setup.decoders[0]
    upstream.fail = failure
    num_calls, num_cancelled = len(upstream.calls), upstream.num_cancelled
    body = json.dumps({"prompt": "hello " * 50, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await until(lambda: len(upstream.calls) > num_calls)
    if stream and failure == "hang_in_body":
        await reader.readuntil(b"t0")
    writer.transport.abort()
    await until(lambda: upstream.num_cancelled > num_cancelled)
    upstream.fail = ""


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("where", ["prefill:hang", "decode:hang", "decode:hang_in_body"])
async def test_a_hundred_disconnects_leak_nothing(where: str, stream: bool) -> None:
    async with deployment() as setup:
        await setup.client.post("/v1/completions", json={"prompt": "warm up"})
        tasks_before = asyncio.all_tasks()
        for _ in range(100):
            await leave(setup, stream, where)
        await setup.assert_quiet()
        await until(lambda: len(asyncio.all_tasks()) <= len(tasks_before))
        assert sum(upstream.num_cancelled for upstream in setup.upstreams) == 100
        outcomes = await setup.metric("isochunk_router_requests_total")
        assert outcomes == {"ok": 1, "client_closed": 100}
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
