"""What the client asks for: checks, and how large the prompt is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from isochunk.pd.router.errors import bad_request

UNSTATED_OUTPUT_TOKENS = 512
"""Counted for a decode server's load where a request states no limit."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Exact tokens plus characters that are not counted in tokens yet."""

    num_tokens: int
    num_characters: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request."""

    path: str
    body: dict[str, Any]
    prompt: PromptSize

    @property
    def max_output_tokens(self) -> int:
        """As stated, else a guess; only for balancing."""
        for name in ("max_completion_tokens", "max_tokens"):
            value = self.body.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return UNSTATED_OUTPUT_TOKENS


def parse(path: str, content: bytes) -> GenerateRequest:
    """Parse and check a completion or chat completion request.

    A transfer of KV blocks belongs to one engine request with one prompt. vLLM makes
    several engine requests of n > 1, of beam search and of a list of prompts, all with
    the same transfer parameters, and the blocks are released after the first of them.
    The decode server computes no logits of prompt tokens that it received.

    Raises:
        RouterError: 400 that names the field.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise bad_request("The request body is not valid JSON.") from None
    if not isinstance(body, dict):
        raise bad_request("The request body must be a JSON object.")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise _refusal(name, body[name], "1")
    if body.get("use_beam_search"):
        raise _refusal("use_beam_search", True, "false")
    if body.get("prompt_logprobs") is not None:
        raise _refusal("prompt_logprobs", body["prompt_logprobs"], "null")
    if "messages" not in body and body.get("echo") and body.get("logprobs") is not None:
        raise _refusal("logprobs", body["logprobs"], "null together with echo")
    if body.get("prompt_embeds") is not None:
        raise bad_request(
            "prompt_embeds is not supported by this prefill–decode deployment: give prompt.",
            "prompt_embeds",
        )
    if body.get("kv_transfer_params") is not None:
        raise bad_request(
            "kv_transfer_params is set by the router: leave it out.", "kv_transfer_params"
        )
    return GenerateRequest(path, body, _prompt_size(body))


def _refusal(name: str, value: object, valid: str) -> Exception:
    return bad_request(
        f"{name}={value!r} is not supported by this prefill–decode deployment: it must be {valid}.",
        name,
    )


def _prompt_size(body: dict[str, Any]) -> PromptSize:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise bad_request(
                f"prompt is a list of {len(prompt)} prompts: this prefill–decode deployment "
                "takes one prompt per request.",
                "prompt",
            )
        prompt = prompt[0]
    if isinstance(prompt, list):
        return PromptSize(len(prompt), 0)
    if isinstance(prompt, str):
        return PromptSize(0, len(prompt))
    return PromptSize(0, _num_characters(body.get("messages")) + _num_characters(body.get("tools")))


def _num_characters(value: object) -> int:
    """Text anywhere in ``value``; names of fields don't count, nor do encoded pictures."""
    num_characters = 0
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            num_characters += 0 if value.startswith("data:") else len(value)
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, dict):
            rest.extend(value.values())
    return num_characters
