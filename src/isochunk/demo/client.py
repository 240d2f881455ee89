"""What the demo asks of a server, through the OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from isochunk.config import OVERRIDE_ARG

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """A streamed answer."""

    request_id: str
    ttft_s: float
    text: str
    num_prompt_tokens: int


class Client:
    """Streams completions and reads the metrics of one server."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._model = model

    def complete(self, prompt: list[int], *, fixed: bool, max_tokens: int) -> Answer:
        """Greedy completion of a prompt of token ids."""
        return self._stream("/v1/completions", {"prompt": prompt}, fixed, max_tokens)

    def chat(self, content: str, *, fixed: bool, max_tokens: int) -> Answer:
        """Greedy answer to a user message."""
        messages = [{"role": "user", "content": content}]
        return self._stream("/v1/chat/completions", {"messages": messages}, fixed, max_tokens)

    def _stream(self, path: str, body: dict[str, Any], fixed: bool, max_tokens: int) -> Answer:
        body |= {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if fixed:  # whole budgets, as stock vLLM would schedule them
            body["vllm_xargs"] = {OVERRIDE_ARG: 0}
        text, request_id, num_prompt_tokens, ttft_s = "", "", 0, 0.0
        start = time.monotonic()
        with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise RuntimeError(f"{path}: status {response.status_code}: {response.text}")
            for event in _events(response):
                request_id = event["id"]
                for choice in event["choices"]:
                    piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    if piece and not ttft_s:
                        ttft_s = time.monotonic() - start
                    text += piece
                if event.get("usage"):
                    num_prompt_tokens = event["usage"]["prompt_tokens"]
        return Answer(request_id, ttft_s or time.monotonic() - start, text, num_prompt_tokens)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text without special ones."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        count: int = self._http.post("/tokenize", json=body).raise_for_status().json()["count"]
        return count

    def metrics(self) -> str:
        """Prometheus metrics."""
        return self._http.get("/metrics").raise_for_status().text

    def is_model_installed(self) -> bool:
        """Whether the server sizes chunks from a fitted model by now."""
        lines = [x for x in self.metrics().splitlines() if x.startswith("isochunk_model_installed")]
        return any(float(line.split()[-1]) == 1 for line in lines)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    buffer = ""
    for text in response.iter_text():
        # Split at newlines only: iter_lines also splits at separators inside an answer.
        *lines, buffer = (buffer + text).split("\n")
        for line in lines:
            data = line.removeprefix("data: ").strip()
            if line.startswith("data: ") and data != "[DONE]":
                yield json.loads(data)
