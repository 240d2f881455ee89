"""First-token latency that the router adds: ``python -m bench.router_latency``.

Prefill and decode servers that answer at once. Direct: the client makes both calls
itself, as the router would; the time from before the first to the first event of the
second. Routed: one call. The two alternate. Client, servers and router are one process
each; connections are kept alive.
"""

from __future__ import annotations

import http.client
import json
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

OUTPUT = Path("bench/results/router_latency.txt")
PATH = "/v1/completions"
NUM_PAIRS = 500
NUM_WARM_UP = 50
PROMPTS = {
    "text of 1 000 characters": "word " * 200,
    "text of 500 000 characters": "word " * 100_000,
    "131 072 token ids": list(range(10_000, 141_072)),
}
EVENTS = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n', b"data: [DONE]\n\n"
KV_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]]}


async def generate(request: Request) -> Response:
    body = await request.json()
    if not body.get("stream"):
        answer = {"usage": {"prompt_tokens": 200}, "kv_transfer_params": KV_PARAMS}
        return JSONResponse(answer)

    async def events() -> Any:
        for event in EVENTS:
            yield event

    return StreamingResponse(events(), media_type="text/event-stream")


async def health(_: Request) -> Response:
    return Response()


def serve(port: int) -> None:
    routes = [Route(PATH, generate, methods=["POST"]), Route("/health", health)]
    routes.append(Route("/metrics", health))
    uvicorn.run(Starlette(routes=routes), port=port, log_level="error", timeout_keep_alive=600)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def connect(port: int) -> http.client.HTTPConnection:
    """Once the server answers /health."""
    deadline = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/health")
            if _read(connection.getresponse()) == 200:
                assert connection.sock is not None
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"no server on port {port}")
        time.sleep(0.05)


def _read(response: http.client.HTTPResponse) -> int:
    response.read()
    return response.status


def post(connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    return connection.getresponse()


@dataclass(frozen=True)
class Bodies:
    """Written beforehand: what counts is the router's time, not the client's."""

    prefill: bytes
    decode: bytes
    whole: bytes

    @classmethod
    def of(cls, prompt: object) -> Self:
        """Those of one request."""
        whole = {"model": "m", "prompt": prompt, "max_tokens": 64, "stream": True}
        cut = {"max_tokens": 1, "min_tokens": 1, "stream": False}
        prefill = whole | cut | {"kv_transfer_params": {"do_remote_decode": True}}
        decode = whole | {"kv_transfer_params": KV_PARAMS}
        return cls(*(json.dumps(body).encode() for body in (prefill, decode, whole)))


def first_event_ms(
    server: http.client.HTTPConnection,
    body: bytes,
    prefill: tuple[http.client.HTTPConnection, bytes] | None = None,
) -> float:
    """Time [ms] until the first event; ``prefill`` is None where the router does it."""
    start = time.perf_counter()
    if prefill is not None:
        json.loads(post(*prefill).read())
    response = post(server, body)
    assert response.readline() == EVENTS[0][:-1]
    elapsed_ms = (time.perf_counter() - start) * 1000
    response.read()
    return elapsed_ms


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def compare(direct: Callable[[], float], routed: Callable[[], float], num_pairs: int) -> str:
    for _ in range(NUM_WARM_UP):
        direct(), routed()
    pairs = [(direct(), routed()) for _ in range(num_pairs)]
    by_hand, through = [p[0] for p in pairs], [p[1] for p in pairs]
    added = [after - before for before, after in pairs]
    cells = [percentile(v, p) for p in (50, 99) for v in (by_hand, through, added)]
    return " ".join(f"{cell:8.2f}" for cell in cells)


def main() -> None:
    ports = [free_port() for _ in range(3)]
    prefill_port, decode_port, router_port = map(str, ports)
    commands = [
        [sys.executable, "-m", "bench.router_latency", prefill_port],
        [sys.executable, "-m", "bench.router_latency", decode_port],
        f"{sys.executable} -m isochunk.cli router --port {router_port} "
        f"--prefiller-port {prefill_port} --decoder-port {decode_port}".split(),
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, port in zip(commands, ports, strict=True):
            processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            connect(port).close()
        prefill, decode, router = map(connect, ports)
        lines = [
            "python -m bench.router_latency",
            f"{datetime.now(UTC):%Y-%m-%d}, 2-core x86-64 VM, Python {platform.python_version()}",
            "First event [ms]: both calls by hand, through the router, and the router's part",
            "(differences of neighbouring measurements); servers that answer at once.",
            " " * 44 + "p50" + " " * 24 + "p99",
            " " * 30 + "by hand   routed    added  by hand   routed    added",
        ]
        for name, prompt in PROMPTS.items():
            bodies = Bodies.of(prompt)
            num_pairs = NUM_PAIRS if len(prompt) < 10_000 else NUM_PAIRS // 5
            cells = compare(
                partial(first_event_ms, decode, bodies.decode, (prefill, bodies.prefill)),
                partial(first_event_ms, router, bodies.whole),
                num_pairs,
            )
            lines.append(f"{name:28} {cells}")
            print(lines[-1], file=sys.stderr)
    finally:
        for process in processes:
            process.terminate()
    text = "\n".join(lines) + "\n"
    print(text, end="")
    OUTPUT.write_text("".join(f"# {line}\n" for line in lines[:2]) + "\n".join(lines[2:]) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]))
    else:
        main()
