"""The way of one request through the router, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from tests.unit.router_upstreams import REFUSAL, SECRET, Deployment, deployment, until

pytestmark = pytest.mark.anyio
PATHS = ["/v1/completions", "/v1/chat/completions"]
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
EACH_PATH = pytest.mark.parametrize("path", PATHS, ids=["completions", "chat"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request_body(path: str, stream: bool, text: str = "hello world " * 10) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "min_tokens": 2, "temperature": 0.5}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 7}
    else:
        body |= {"prompt": text, "max_tokens": 7}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def assert_error(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == status
    assert error["message"]
    assert SECRET not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)


def assert_complete(answer: httpx.Response, stream: bool) -> None:
    assert answer.status_code == 200
    if stream:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.text.count("data: ") == 5
    else:
        assert answer.json()["usage"]["completion_tokens"] == 3


async def fail(setup: Deployment, role: str, failure: str, number: int) -> None:
    for upstream in (setup.prefillers if role == "prefill" else setup.decoders)[:number]:
        upstream.fail = failure
        if failure == "refused":
            await upstream.stop()


@BOTH
@EACH_PATH
async def test_both_servers_get_what_they_need(path: str, stream: bool) -> None:
    body = request_body(path, stream)
    headers = {"Authorization": "Bearer key", "X-Request-Id": "mine", "X-Tenant": "a"}
    async with deployment() as setup:
        answer = await setup.client.post(path, json=body, headers=headers)
        decoder_url = f"http://127.0.0.1:{setup.decoders[0].port}{path}"
        direct = await setup.client.post(decoder_url, json=body)
        await setup.assert_quiet()
        (prefill,) = setup.prefillers[0].calls
        decode = setup.decoders[0].calls[0]
        assert await setup.metric("isochunk_router_requests_total") == {"ok": 1}
        assert (await setup.metric("isochunk_router_own_seconds_count")) == {"": 1}

    assert answer.content == direct.content  # usage counts included
    assert answer.headers["content-type"] == direct.headers["content-type"]
    assert answer.headers["x-request-id"] == "mine"
    for call in (prefill, decode):
        assert call.path == path
        assert call.headers["authorization"] == "Bearer key"
        assert call.headers["x-request-id"] == "mine"
        assert call.headers["x-tenant"] == "a"
        assert call.headers["content-type"] == "application/json"
    expected = {name: value for name, value in body.items() if name != "stream_options"}
    expected |= {"max_tokens": 1, "min_tokens": 1, "stream": False}
    if "chat" in path:
        expected["max_completion_tokens"] = 1
    expected["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert prefill.body == expected
    kv_params = decode.body.pop("kv_transfer_params")
    assert decode.body == body
    assert kv_params["remote_engine_id"] == "p0"
    assert kv_params["remote_block_ids"] == [[1, 2, 1]]
    assert kv_params["pp_size"] == 2


async def test_a_request_without_an_id_gets_one_for_both_servers() -> None:
    async with deployment() as setup:
        for _ in range(2):
            await setup.client.post(PATHS[0], json=request_body(PATHS[0], False))
        ids = [[call.headers["x-request-id"] for call in u.calls] for u in setup.upstreams]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


@BOTH
async def test_one_output_token_comes_from_decode(stream: bool) -> None:
    async with deployment() as setup:
        setup.decoders[0].num_output_tokens = 1
        body = request_body(PATHS[0], stream) | {"max_tokens": 1, "min_tokens": 0}
        answer = await setup.client.post(PATHS[0], json=body)
        assert setup.decoders[0].calls[0].body["max_tokens"] == 1
    assert '"completion_tokens": 1' in answer.text.replace('":1', '": 1')


@BOTH
@EACH_PATH
@pytest.mark.parametrize("num_prefillers", [1, 2])
async def test_a_refused_prefill_is_the_clients_answer(
    path: str, stream: bool, num_prefillers: int
) -> None:
    async with deployment(num_prefillers) as setup:
        await fail(setup, "prefill", "400", num_prefillers)
        answer = await setup.client.post(path, json=request_body(path, stream))
        await setup.assert_quiet()
        prefills, decodes = setup.num_calls()
        assert await setup.metric("isochunk_router_requests_total") == {"refused": 1}
    assert answer.status_code == 400
    assert answer.json() == REFUSAL
    assert sum(prefills) == 1
    assert decodes == [0]


@BOTH
@EACH_PATH
@pytest.mark.parametrize("failure", ["refused", "500", "503", "reset", "reset_in_body"])
async def test_a_failing_prefiller_is_replaced(path: str, stream: bool, failure: str) -> None:
    async with deployment(num_prefillers=2) as setup:
        await fail(setup, "prefill", failure, 1)
        answer = await setup.client.post(path, json=request_body(path, stream))
        await setup.assert_quiet()
        assert setup.num_calls() == ([int(failure != "refused"), 1], [1])
        name = f"127.0.0.1:{setup.prefillers[0].port},prefill"
        assert await setup.metric("isochunk_router_retries_total") == {name: 1}
        ids = [u.calls[0].headers["x-request-id"] for u in setup.upstreams[1:]]
        assert ids[0] == ids[1]
        engine = setup.decoders[0].calls[0].body["kv_transfer_params"]["remote_engine_id"]
    assert_complete(answer, stream)
    assert engine == "p1"


@BOTH
@EACH_PATH
@pytest.mark.parametrize("num_prefillers", [1, 2])
@pytest.mark.parametrize("failure", ["refused", "500", "503", "reset", "reset_in_body"])
async def test_no_prefiller_left(
    path: str, stream: bool, failure: str, num_prefillers: int
) -> None:
    async with deployment(num_prefillers) as setup:
        await fail(setup, "prefill", failure, num_prefillers)
        started_s = time.monotonic()
        answer = await setup.client.post(path, json=request_body(path, stream))
        assert time.monotonic() - started_s < 2
        await setup.assert_quiet()
        num_tried = int(failure != "refused")
        assert setup.num_calls() == ([num_tried] * num_prefillers, [0])
    assert_error(answer, 503)


@BOTH
@EACH_PATH
@pytest.mark.parametrize("num_decoders", [1, 2])
@pytest.mark.parametrize("failure", ["refused", "400", "500", "503", "reset", "reset_in_body"])
async def test_a_failing_decoder(path: str, stream: bool, failure: str, num_decoders: int) -> None:
    async with deployment(num_decoders=num_decoders) as setup:
        await fail(setup, "decode", failure, 1)
        answer = await setup.client.post(path, json=request_body(path, stream))
        await setup.assert_quiet()
        (num_prefills,), num_decodes = setup.num_calls()
        ids = [c.headers["x-request-id"] for c in setup.prefillers[0].calls]
        decode_ids = [c.headers["x-request-id"] for d in setup.decoders for c in d.calls]
        outcomes = await setup.metric("isochunk_router_requests_total")
    lost_in_stream = failure == "reset_in_body" and stream
    retried = num_decoders == 2 and failure not in ("400", "500") and not lost_in_stream
    # KV blocks that nobody has asked for yet serve the next decoder.
    assert num_prefills == (2 if retried and failure != "refused" else 1)
    assert sum(num_decodes) == (failure != "refused") + retried
    assert decode_ids == (ids if decode_ids else [])
    assert len(set(ids)) == len(ids)
    if retried:
        assert_complete(answer, stream)
        assert outcomes == {"ok": 1}
    elif lost_in_stream:
        assert answer.status_code == 200
        first, last = answer.text.strip().split("\n\n")
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "t0"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 502
        assert outcomes == {"decode_lost": 1}
    elif failure == "400":
        assert answer.status_code == 400
        assert answer.json() == REFUSAL
    else:
        assert_error(answer, 503 if failure in ("refused", "503") else 502)


async def test_a_prefill_that_takes_too_long() -> None:
    async with deployment(2, prefill_timeout_s=0.2) as setup:
        await fail(setup, "prefill", "hang", 2)
        answer = await setup.client.post(PATHS[0], json=request_body(PATHS[0], False))
        await setup.assert_quiet()
        assert sum(setup.num_calls()[0]) == 1
        assert sum(p.num_cancelled for p in setup.prefillers) == 1
    assert_error(answer, 504)


@BOTH
@pytest.mark.parametrize("failure", ["hang", "hang_in_body"])
async def test_a_silent_decoder(stream: bool, failure: str) -> None:
    async with deployment(decode_timeout_s=0.2) as setup:
        await fail(setup, "decode", failure, 1)
        answer = await setup.client.post(PATHS[0], json=request_body(PATHS[0], stream))
        await setup.assert_quiet()
        assert setup.decoders[0].num_cancelled == 1
    if stream and failure == "hang_in_body":
        assert "[DONE]" not in answer.text
        assert "error" in json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    else:
        assert_error(answer, 504)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stall_s", [0, 0.5])
async def test_a_socket_that_nobody_accepts_from(role: str, stall_s: float) -> None:
    """A dead server's child may keep its listening socket: connections go nowhere.

    However late the next probe is sent: the router may not have had the CPU for a while.
    """
    async with deployment(health_interval_s=0.1, health_timeout_s=0.3) as setup:
        upstream = setup.prefillers[0] if role == "prefill" else setup.decoders[0]
        await upstream.stop()
        with socket.create_server(("127.0.0.1", upstream.port)):
            started_s = time.monotonic()
            body = request_body(PATHS[0], True)
            flight = asyncio.create_task(setup.client.post(PATHS[0], json=body))
            await asyncio.sleep(0.05)
            time.sleep(stall_s)
            answer = await flight
            assert time.monotonic() - started_s < 2 + stall_s
        assert answer.status_code in (502, 503)
        await setup.assert_quiet()


async def test_killed_with_requests_in_flight_and_back_again() -> None:
    async with deployment(2, 1, health_interval_s=0.1) as setup:
        (decoder,) = setup.decoders
        decoder.fail = "hang_in_body"
        bodies = [request_body(path, stream) for path in PATHS for stream in (False, True)] * 3
        flights = [
            asyncio.create_task(
                setup.client.post(PATHS[1] if "messages" in body else PATHS[0], json=body)
            )
            for body in bodies
        ]
        await until(lambda: len(decoder.calls) == len(bodies))
        await decoder.stop()
        killed_s = time.monotonic()
        for flight, body in zip(flights, bodies, strict=True):
            answer = await flight
            if "stream" in body:
                assert "error" in answer.text
                assert "[DONE]" not in answer.text
            else:
                assert_error(answer, 502)
        assert time.monotonic() - killed_s < 2
        health = await setup.client.get("/health")
        assert health.status_code == 503
        assert health.json()["down"] == {"prefill": [], "decode": [f"127.0.0.1:{decoder.port}"]}
        num_prefills = sum(setup.num_calls()[0])
        assert_error(await setup.client.post(PATHS[0], json=bodies[0]), 503)
        assert sum(setup.num_calls()[0]) == num_prefills  # no prefill in vain
        await setup.assert_quiet()

        decoder.fail = ""
        await decoder.start()
        async with asyncio.timeout(5):
            while (await setup.client.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
        assert_complete(await setup.client.post(PATHS[0], json=bodies[0]), stream=False)


async def test_prefill_answers_without_kv_params_are_computed_by_decode() -> None:
    async with deployment() as setup:
        setup.prefillers[0].keeps_kv = False
        answer = await setup.client.post(PATHS[0], json=request_body(PATHS[0], False))
        assert "kv_transfer_params" not in setup.decoders[0].calls[0].body
        name = f"127.0.0.1:{setup.prefillers[0].port}"
        assert await setup.metric("isochunk_router_untransferred_total") == {name: 1}
    assert_complete(answer, stream=False)


async def test_models_come_from_a_server_that_is_up() -> None:
    async with deployment() as setup:
        assert (await setup.client.get("/v1/models")).json() == {"data": [{"id": "d0"}]}
        await setup.decoders[0].stop()
        assert (await setup.client.get("/v1/models")).json() == {"data": [{"id": "p0"}]}
        await setup.prefillers[0].stop()
        assert_error(await setup.client.get("/v1/models"), 503)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
async def test_what_cannot_be_right_is_refused(change: dict[str, Any], param: str) -> None:
    async with deployment() as setup:
        answer = await setup.client.post(PATHS[0], json=request_body(PATHS[0], False) | change)
        assert setup.num_calls() == ([0], [0])
        assert await setup.metric("isochunk_router_requests_total") == {"bad_request": 1}
    assert_error(answer, 400)
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_object(content: bytes) -> None:
    async with deployment() as setup:
        assert_error(await setup.client.post(PATHS[0], content=content), 400)
        assert setup.num_calls() == ([0], [0])
