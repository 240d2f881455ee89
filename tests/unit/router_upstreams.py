"""Small stand-ins for prefill and decode servers, on real loopback sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from isochunk.pd.router.app import create_app
from isochunk.pd.router.settings import Address, RouterSettings

CHARACTERS_PER_TOKEN = 4
SECRET = "Traceback: internal"
REFUSAL = {
    "error": {
        "message": "This model's maximum context length is 8 tokens.",
        "type": "BadRequestError",
        "param": "prompt",
        "code": 400,
    }
}


class Served:
    """An ASGI app on a loopback socket, in this event loop."""

    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        # asyncio turns Nagle's algorithm off only where the protocol is named: else 40 ms more.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        config = uvicorn.Config(app, log_level="critical", ws="none")
        config.load()
        self.server = uvicorn.Server(config)
        self.server.lifespan = config.lifespan_class(config)

    async def start(self) -> None:
        # Without serve(): that one takes over signal handlers and looks up every 0.1 s.
        await self.server.startup(sockets=[self._listener])

    async def stop(self) -> None:
        """As kill -9 looks from outside: every connection is reset, new ones are refused."""
        for listening in self.server.servers:
            listening.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()
        await until(lambda: not self.server.server_state.tasks)
        await self.server.lifespan.shutdown()


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """The port of an ASGI app."""
    running = Served(app)
    await running.start()
    try:
        yield running.port
    finally:
        await running.stop()


@dataclass
class Call:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Upstream:
    """One server. ``fail`` is what its next calls do instead of answering."""

    name: str
    num_output_tokens: int = 3
    fail: str = ""  # "", 400, 500, 503, reset, reset_in_body, hang, hang_in_body
    metrics: str = ""
    keeps_kv: bool = True
    calls: list[Call] = field(default_factory=list)
    num_cancelled: int = 0
    num_open: int = 0
    num_finished: int = 0
    port: int = 0
    _served: Served | None = None

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def start(self) -> None:
        self._served = Served(self.app, self.port)
        self.port = self._served.port
        await self._served.start()

    async def stop(self) -> None:
        if self._served is not None:
            await self._served.stop()
            self._served = None

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": self.name}]})

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(Call(request.url.path, dict(request.headers), body))
        self.num_open += 1
        try:
            if self.fail == "400":
                return JSONResponse(REFUSAL, 400)
            if self.fail in ("500", "503"):
                return JSONResponse({"error": {"message": SECRET}}, int(self.fail))
            if self.fail == "reset":
                self._reset(request)
            if self.fail in ("reset", "hang") or (
                self.fail == "hang_in_body" and not _stream(body)
            ):
                await self._wait_for_disconnect(request)
            if _stream(body) or self.fail == "reset_in_body":
                self.num_open += 1
                media_type = "text/event-stream" if _stream(body) else "application/json"
                return StreamingResponse(self._events(request, body), media_type=media_type)
            self.num_finished += 1
            return JSONResponse(self._answer(body, request.url.path))
        finally:
            self.num_open -= 1

    async def _wait_for_disconnect(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.num_cancelled += 1

    def _reset(self, request: Request) -> None:
        assert self._served is not None
        for connection in list(self._served.server.server_state.connections):
            if connection.client == tuple(request.scope["client"]):
                connection.transport.abort()

    def _usage(self, body: dict[str, Any], num_output_tokens: int) -> dict[str, int]:
        num_prompt_tokens = len(_text(body)) // CHARACTERS_PER_TOKEN
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        }

    def _answer(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        asked = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        num_tokens = min(self.num_output_tokens, body.get("max_tokens") or 16)
        answer: dict[str, Any] = {
            "object": "chat.completion" if "chat" in path else "text_completion",
            "choices": [{"index": 0, "text": "x" * num_tokens, "finish_reason": "length"}],
            "usage": self._usage(body, num_tokens),
        }
        if asked and self.keeps_kv:
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.name,
                "remote_block_ids": [[1, 2, len(self.calls)]],
                "remote_host": "127.0.0.1",
                "remote_port": 5,
                "pp_size": 2,
            }
        return answer

    async def _events(self, request: Request, body: dict[str, Any]) -> AsyncIterator[bytes]:
        finished = False
        try:
            for index in range(self.num_output_tokens):
                yield _event({"choices": [{"index": 0, "text": f"t{index}"}]})
                if self.fail == "reset_in_body":
                    self._reset(request)
                if self.fail in ("reset_in_body", "hang_in_body"):
                    await asyncio.sleep(60)
            if (body.get("stream_options") or {}).get("include_usage"):
                yield _event({"choices": [], "usage": self._usage(body, self.num_output_tokens)})
            yield b"data: [DONE]\n\n"
            finished = True
        finally:
            self.num_open -= 1
            self.num_finished += finished
            self.num_cancelled += not finished


def _stream(body: dict[str, Any]) -> bool:
    return bool(body.get("stream"))


def _text(body: dict[str, Any]) -> str:
    return str(body["prompt"]) if "prompt" in body else str(body["messages"][0]["content"])


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@dataclass
class Deployment:
    """Fake servers, a router in front of them, and a client of the router."""

    prefillers: list[Upstream]
    decoders: list[Upstream]
    client: httpx.AsyncClient
    port: int

    @property
    def upstreams(self) -> list[Upstream]:
        return [*self.prefillers, *self.decoders]

    def num_calls(self) -> tuple[list[int], list[int]]:
        return [len(p.calls) for p in self.prefillers], [len(d.calls) for d in self.decoders]

    async def metric(self, name: str) -> dict[str, float]:
        """Label values -> value."""
        text = (await self.client.get("/metrics")).text
        return {
            ",".join(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    async def assert_quiet(self) -> None:
        """Nothing is left of any request, on either side."""
        await until(lambda: not any(u.num_open for u in self.upstreams))
        for name in ("in_flight", "tokens_in_flight", "predicted_prefill_ms"):
            deadline = time.monotonic() + 5
            while any((values := await self.metric(f"isochunk_router_{name}")).values()):
                assert time.monotonic() < deadline, values
                await asyncio.sleep(0.005)
            assert values


@asynccontextmanager
async def deployment(
    num_prefillers: int = 1, num_decoders: int = 1, **settings: Any
) -> AsyncIterator[Deployment]:
    prefillers = [Upstream(f"p{index}") for index in range(num_prefillers)]
    decoders = [Upstream(f"d{index}") for index in range(num_decoders)]
    async with AsyncExitStack() as stack:
        for upstream in (*prefillers, *decoders):
            await upstream.start()
            stack.push_async_callback(upstream.stop)
        router_settings = RouterSettings(
            prefillers=tuple(Address(host="127.0.0.1", port=p.port) for p in prefillers),
            decoders=tuple(Address(host="127.0.0.1", port=d.port) for d in decoders),
            **({"health_interval_s": 60.0} | settings),
        )
        port = await stack.enter_async_context(served(create_app(router_settings)))
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=10
            )
        )
        yield Deployment(prefillers, decoders, client, port)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
