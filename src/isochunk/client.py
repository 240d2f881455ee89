"""What isochunk's commands ask of a vLLM server, through its HTTP API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from isochunk.config import OVERRIDE_ARG

TIMEOUT_S = 300.0


class ApiError(RuntimeError):
    """The server can't be reached, or refuses; the message says which URL and what it answered.

    ``status`` is that of the HTTP answer, None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """A streamed answer."""

    request_id: str
    ttft_s: float
    text: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class ServedModel:
    """A line of ``/v1/models``."""

    name: str
    max_model_len: int | None
    """Longest context [tokens], if the server says it."""


class Client:
    """Streams completions and reads the metrics of one server.

    Args:
        url: of the server, without ``/v1``.
        model: name of the model to ask.
        api_key: sent as a bearer token.
        timeout_s: to wait for each part of an answer, the first token included.
    """

    def __init__(
        self, url: str, model: str = "", *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, timeout=timeout_s, headers=headers)
        self.model = model

    def complete(self, prompt: list[int], *, fixed: bool = False, max_tokens: int) -> Answer:
        """Greedy completion of a prompt of token ids."""
        return self._stream("/v1/completions", {"prompt": prompt}, fixed, max_tokens)

    def chat(self, content: str, *, fixed: bool, max_tokens: int) -> Answer:
        """Greedy answer to a user message."""
        messages = [{"role": "user", "content": content}]
        return self._stream("/v1/chat/completions", {"messages": messages}, fixed, max_tokens)

    def _stream(self, path: str, body: dict[str, Any], fixed: bool, max_tokens: int) -> Answer:
        body |= {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if fixed:  # whole budgets, as stock vLLM would schedule them
            body["vllm_xargs"] = {OVERRIDE_ARG: 0}
        text, request_id, num_prompt_tokens, ttft_s = "", "", 0, 0.0
        start = time.monotonic()
        with self._reaching(path), self._http.stream("POST", path, json=body) as response:
            if response.status_code != HTTPStatus.OK:
                response.read()
            _check(response)
            for event in _events(response):
                if "error" in event:  # the status went out before the fault
                    raise ApiError(f"{response.url}: {_message(event)}")
                request_id = event["id"]
                for choice in event["choices"]:
                    piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    if piece and not ttft_s:
                        ttft_s = time.monotonic() - start
                    text += piece
                if event.get("usage"):
                    num_prompt_tokens = event["usage"]["prompt_tokens"]
        if not num_prompt_tokens:
            raise ApiError(f"{response.url}: the answer ended early")
        return Answer(request_id, ttft_s or time.monotonic() - start, text, num_prompt_tokens)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text without special ones."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._json("POST", "/tokenize", json=body)["tokens"]
        return tokens

    def models(self) -> list[ServedModel]:
        """What the server serves."""
        cards = self._json("GET", "/v1/models")["data"]
        return [ServedModel(card["id"], card.get("max_model_len")) for card in cards]

    def vllm_version(self) -> str:
        """Release of the server."""
        version: str = self._json("GET", "/version")["version"]
        return version

    def metrics(self) -> str:
        """Prometheus metrics."""
        return self._request("GET", "/metrics").text

    def is_model_installed(self) -> bool:
        """Whether the server sizes chunks from a fitted model by now."""
        lines = [x for x in self.metrics().splitlines() if x.startswith("isochunk_model_installed")]
        return any(float(line.split()[-1]) == 1 for line in lines)

    def _json(self, method: str, path: str, **body: Any) -> Any:
        response = self._request(method, path, **body)
        try:
            return response.json()
        except ValueError:
            raise ApiError(f"{response.url}: the answer is no JSON; is this vLLM?") from None

    def _request(self, method: str, path: str, **body: Any) -> httpx.Response:
        with self._reaching(path):
            return _check(self._http.request(method, path, **body))

    @contextmanager
    def _reaching(self, path: str) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            detail = str(error) or type(error).__name__
            url = f"{str(self._http.base_url).rstrip('/')}{path}"
            raise ApiError(f"{url}: no answer: {detail}") from error


def _check(response: httpx.Response) -> httpx.Response:
    if response.status_code != HTTPStatus.OK:
        try:
            detail = _message(response.json())
        except ValueError:
            detail = response.text[:200]
        raise ApiError(
            f"{response.url}: status {response.status_code}: {detail}", response.status_code
        )
    return response


def _message(body: Any) -> str:
    """What an OpenAI-style error says: ``{"error": {"message": …}}``, or less."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    buffer = ""
    for text in response.iter_text():
        # Split at newlines only: iter_lines also splits at separators inside an answer.
        *lines, buffer = (buffer + text).split("\n")
        for line in lines:
            data = line.removeprefix("data: ").strip()
            if line.startswith("data: ") and data != "[DONE]":
                yield json.loads(data)
