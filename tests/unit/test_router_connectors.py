"""The Mooncake flow against a stand-in of its registry."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isochunk.pd.router.app import create_app
from isochunk.pd.router.settings import Address, RouterSettings
from tests.unit.router_upstreams import Upstream, served

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Registry:
    def __init__(self, engines: object) -> None:
        self.engines = engines
        self.num_queries = 0

    async def query(self, _: Request) -> Response:
        self.num_queries += 1
        return JSONResponse(self.engines)


@asynccontextmanager
async def mooncake(registry: Registry) -> AsyncIterator[tuple[httpx.AsyncClient, list[Upstream]]]:
    upstreams = [Upstream("p", keeps_kv=False), Upstream("d")]
    for upstream in upstreams:
        await upstream.start()
    app = Starlette(routes=[Route("/query", registry.query)])
    async with served(app) as registry_port:
        prefill, decode = (u.port for u in upstreams)
        settings = RouterSettings(
            prefillers=(Address(host="127.0.0.1", port=prefill, bootstrap_port=registry_port),),
            decoders=(Address(host="127.0.0.1", port=decode),),
            kv_connector="mooncake",
        )
        async with (
            served(create_app(settings)) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            registry.url = f"http://127.0.0.1:{registry_port}"
            yield client, upstreams
    for upstream in upstreams:
        await upstream.stop()


async def test_transfer_id_and_engine_go_to_decode() -> None:
    registry = Registry({"0": {"engine_id": "e0", "worker_addr": {}}})
    async with mooncake(registry) as (client, (prefiller, decoder)):
        for _ in range(2):
            answer = await client.post("/v1/completions", json={"prompt": "hello"})
            assert answer.status_code == 200
    assert registry.num_queries == 1
    prefills = [call.body["kv_transfer_params"] for call in prefiller.calls]
    decodes = [call.body["kv_transfer_params"] for call in decoder.calls]
    assert prefills[0]["transfer_id"] != prefills[1]["transfer_id"]
    for prefill, decode in zip(prefills, decodes, strict=True):
        transfer_id = prefill.pop("transfer_id")
        assert prefill == {"do_remote_decode": True, "do_remote_prefill": False}
        assert decode == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "e0",
            "remote_bootstrap_addr": registry.url,
            "transfer_id": transfer_id,
        }
    assert "x-data-parallel-rank" not in prefiller.calls[0].headers


async def test_data_parallel_engines_take_turns() -> None:
    registry = Registry({str(rank): {"engine_id": f"e{rank}"} for rank in range(2)})
    async with mooncake(registry) as (client, (prefiller, decoder)):
        for _ in range(4):
            await client.post("/v1/completions", json={"prompt": "hello"})
    ranks = [call.headers["x-data-parallel-rank"] for call in prefiller.calls]
    engines = [call.body["kv_transfer_params"]["remote_engine_id"] for call in decoder.calls]
    assert ranks == ["0", "1", "0", "1"]
    assert engines == ["e0", "e1", "e0", "e1"]
    assert "x-data-parallel-rank" not in decoder.calls[0].headers


@pytest.mark.parametrize("engines", [{}, [], {"0": {}}, {"0": None}, "x"], ids=json.dumps)
async def test_a_registry_that_knows_no_engine(engines: object) -> None:
    async with mooncake(Registry(engines)) as (client, (prefiller, _)):
        answer = await client.post("/v1/completions", json={"prompt": "hello"})
    assert answer.status_code == 503
    assert not prefiller.calls
