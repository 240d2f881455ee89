"""A server over real TCP whose answers run through a real controller and the real metrics.

Only the engine is missing: chunk times come from given latency models.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from isochunk import metrics
from isochunk.config import DynamicChunkingConfig
from isochunk.controller import ChunkController
from isochunk.latency import LatencyModel
from isochunk.policies import Prefill, Step
from isochunk.timings import Timing

BUDGET = 4096
STAGES = (LatencyModel(10.0, 0.001, 0.06, 2e-5), LatencyModel(12.0, 0.001, 0.07, 2.4e-5))


def make_controller(
    *, can_spare: bool = False, max_in_flight: int = 0, **settings: Any
) -> ChunkController:
    made = ChunkController(
        DynamicChunkingConfig(enabled=True, **settings),
        max_num_batched_tokens=BUDGET,
        alignment=64,
        num_stages=len(STAGES),
        max_model_len=32768,
        can_spare=can_spare,
        max_in_flight=max_in_flight,
    )
    if not made.calibrator.is_final:
        sizes = range(170, 4097, 170)
        made.add_sweep(
            [(s, [(x, 8 + model.token_ms * x) for x in sizes]) for s, model in enumerate(STAGES)]
        )
    return made


def run_prompt(made: ChunkController, request_id: str, num_tokens: int, noise: float = 0) -> None:
    """A sole prompt; chunk times are the models', off by up to ``noise``."""
    rng, cached = random.Random(request_id), 0
    while cached < num_tokens:
        prefill = Prefill(request_id, cached, num_tokens - cached)
        made.begin_step(Step([prefill]))
        chunk = made.size(prefill, min(BUDGET, prefill.num_remaining))
        tag = made.end_step({request_id: chunk})
        if tag is not None:
            made.ledger.complete(tag)
            made.settle(
                made.ledger.ask(),
                [
                    (
                        stage,
                        [
                            Timing(
                                tag,
                                0.0,
                                model.predict_ms(cached, chunk) * rng.uniform(1 - noise, 1 + noise),
                                2.0 + 0.001 * chunk,
                            )
                        ],
                    )
                    for stage, model in enumerate(STAGES)
                ],
            )
        cached += chunk


@dataclass
class FakeServer:
    """Behaviour and what was asked."""

    controller: ChunkController | None = None
    noise: float = 0.0
    max_model_len: int | None = 32769
    api_key: str | None = None
    metrics_text: str | None = None
    """Instead of the real ones."""
    refuse: str | None = None
    """Message of a 400 to each prompt."""
    break_at: int | None = None
    """Number of the prompt at which the connection is cut."""
    fault: str | None = None
    """Message of an error event in each answer."""
    hang_s: float = 0
    """Before each answer."""
    prompts: list[list[int]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        if self.controller is not None:
            self.exporter = metrics.CalibrationExporter(self.controller, "cpu", 1)
            self.exporter.export()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/metrics", self._metrics),
                Route("/version", lambda _: JSONResponse({"version": "0.32.0"})),
            ]
        )

    def _unauthorized(self, request: Request) -> Response | None:
        if self.api_key in (None, request.headers.get("authorization", "").removeprefix("Bearer ")):
            return None
        return JSONResponse({"error": "Unauthorized"}, 401)

    def _models(self, request: Request) -> Response:
        card = {"id": "toy", "max_model_len": self.max_model_len}
        return self._unauthorized(request) or JSONResponse({"object": "list", "data": [card]})

    def _metrics(self, request: Request) -> Response:
        if self.metrics_text is not None:
            return PlainTextResponse(self.metrics_text)
        return Response(prometheus_client.generate_latest(), media_type="text/plain")

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": list((await request.json())["prompt"].encode())})

    async def _complete(self, request: Request) -> Response:
        if (refused := self._unauthorized(request)) is not None:
            return refused
        if self.refuse is not None:
            return JSONResponse({"error": {"message": self.refuse, "code": 400}}, 400)
        body = await request.json()
        self.prompts.append(body["prompt"])
        assert body["max_tokens"] == 1
        return StreamingResponse(self._stream(body["prompt"]), media_type="text/event-stream")

    async def _stream(self, prompt: list[int]) -> AsyncIterator[str]:
        await asyncio.sleep(self.hang_s)
        if self.fault is not None:
            yield f"data: {json.dumps({'error': {'message': self.fault, 'code': 500}})}\n\n"
        number = len(self.prompts)
        if number == self.break_at:
            yield "data: "
            raise ConnectionResetError("cut on purpose")
        assert self.controller is not None
        run_prompt(self.controller, f"r{number}", len(prompt), self.noise)
        self.exporter.export()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        for event in ({"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}):
            yield f"data: {json.dumps({'id': f'cmpl-{number}'} | event)}\n\n"
        yield "data: [DONE]\n\n"


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Serve on a free loopback port."""
    server = uvicorn.Server(
        uvicorn.Config(fake.app(), host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline
            assert thread.is_alive()
            time.sleep(0.01)
        fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield fake
    finally:
        server.should_exit = True
        thread.join()


def clear_metrics() -> None:
    """Forget what other tests have exported."""
    metrics.INSTALLED.set(0)
    for gauge in (
        metrics.CALIBRATION,
        metrics.FIXED,
        metrics.ENGINE,
        metrics.MODEL,
        metrics.STANDARD_ERROR,
        metrics.OVERHEAD,
        metrics.FIT,
    ):
        gauge.clear()
