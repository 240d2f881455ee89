"""Requests for a deployment, each checked against what one plain server answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Ask:
    """One completion request."""

    prompt: tuple[int, ...]
    max_tokens: int
    is_stream: bool

    def body(self, model: str) -> dict[str, Any]:
        """As JSON for ``/v1/completions``: greedy, with token ids in the answer."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "min_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.is_stream,
        }
        if self.is_stream:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass
class Outcome:
    """What came of it."""

    tokens: tuple[int, ...] = ()
    usage: tuple[int, int] | None = None
    error: str = ""
    ttft_s: float = float("nan")
    ended_at: float = 0.0


def make_asks(
    num_requests: int, *, lengths: tuple[int, int] = (16, 4096), max_tokens: int = 16, seed: int = 0
) -> list[Ask]:
    """Distinct prompts, their lengths log-uniform over a range, half of them streamed."""
    rng = random.Random(seed)
    low, high = lengths
    return [
        Ask(
            prompt=tuple(
                rng.randrange(258, 512) for _ in range(round(low * (high / low) ** rng.random()))
            ),
            max_tokens=max_tokens,
            is_stream=number % 2 == 1,
        )
        for number in range(num_requests)
    ]


async def send(client: httpx.AsyncClient, model: str, ask: Ask) -> Outcome:
    """Send it and read the whole answer; faults end up in ``error``."""
    outcome = Outcome()
    start = time.monotonic()
    tokens: list[int] = []
    try:
        async with client.stream("POST", "/v1/completions", json=ask.body(model)) as response:
            if response.status_code != 200 or not ask.is_stream:
                answer = json.loads(await response.aread())
                if response.status_code != 200:
                    outcome.error = f"{response.status_code} {answer}"
                else:
                    outcome.tokens, outcome.usage = _tokens(answer), _usage(answer)
                return outcome
            is_done = False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    break
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    outcome.error = f"event {chunk['error']}"
                    return outcome
                if not tokens:
                    outcome.ttft_s = time.monotonic() - start
                if chunk["choices"]:
                    tokens += _tokens(chunk)
                outcome.usage = _usage(chunk) or outcome.usage
            outcome.tokens = tuple(tokens)
            if not is_done:
                outcome.error = "the stream ended without [DONE]"
    except (httpx.HTTPError, ValueError) as error:
        outcome.error = repr(error)
    finally:
        outcome.ended_at = time.monotonic()
    return outcome


def _tokens(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(answer["choices"][0].get("token_ids") or ())


def _usage(answer: dict[str, Any]) -> tuple[int, int] | None:
    usage = answer.get("usage")
    return (usage["prompt_tokens"], usage["completion_tokens"]) if usage else None


async def send_all(url: str, model: str, asks: Sequence[Ask], concurrency: int) -> list[Outcome]:
    """All of them, so many at a time."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(ask: Ask) -> Outcome:
            async with gate:
                return await send(client, model, ask)

        return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def disconnect_all(
    url: str, model: str, asks: Sequence[Ask], concurrency: int, seed: int = 0
) -> int:
    """Send all and hang up on each after 0–1 s; returns how many were still under way."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:

        async def one(ask: Ask, after_s: float) -> bool:
            async with gate:
                try:
                    await asyncio.wait_for(send(client, model, ask), after_s)
                except TimeoutError:
                    return True
                return False

        return sum(await asyncio.gather(*(one(ask, rng.random()) for ask in asks)))


def check(
    asks: Sequence[Ask], outcomes: Sequence[Outcome], expected: Sequence[Outcome]
) -> list[str]:
    """What is wrong with the outcomes, one line each."""
    wrong = []
    for number, (ask, outcome, other) in enumerate(zip(asks, outcomes, expected, strict=True)):
        usage = (len(ask.prompt), ask.max_tokens)
        if outcome.error:
            wrong.append(f"request {number}: {outcome.error}")
        elif outcome.tokens != other.tokens:
            wrong.append(f"request {number}: {outcome.tokens} is not {other.tokens}")
        elif outcome.usage != usage:
            wrong.append(f"request {number}: usage {outcome.usage} is not {usage}")
    return wrong


def gauges(url: str, name: str) -> list[float]:
    """Values of a metric's series."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return [float(line.rpartition(" ")[2]) for line in found]
