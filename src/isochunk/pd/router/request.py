"""What the client asks for: checks, and how large the prompt is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from isochunk.pd.router.errors import bad_request

RawBody = dict[str, msgspec.Raw]
"""A request's fields as the client wrote them: a prompt of 10⁵ token ids takes longer to
parse and write than all else the router does."""

_READ_BODY = msgspec.json.Decoder(RawBody)
_FIRST_ITEM = re.compile(rb"\[\s*(.)")
_READ_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_LARGE = ("prompt", "messages", "tools")

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
    body: RawBody
    prompt: PromptSize
    options: dict[str, Any]
    """The small fields of the body, parsed."""

    @property
    def max_output_tokens(self) -> int:
        """As stated, else a guess; only for balancing."""
        for name in ("max_completion_tokens", "max_tokens"):
            value = self.options.get(name)
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
        body = _READ_BODY.decode(content)
        options = {name: msgspec.json.decode(body[name]) for name in body if name not in _LARGE}
        size = _prompt_size(body)
    except msgspec.ValidationError:
        raise bad_request("The request body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise bad_request("The request body is not valid JSON.") from None
    for name in ("n", "best_of"):
        if options.get(name) not in (None, 1):
            raise _refusal(name, options[name], "1")
    if options.get("use_beam_search"):
        raise _refusal("use_beam_search", True, "false")
    if options.get("prompt_logprobs") is not None:
        raise _refusal("prompt_logprobs", options["prompt_logprobs"], "null")
    if "messages" not in body and options.get("echo") and options.get("logprobs") is not None:
        raise _refusal("logprobs", options["logprobs"], "null together with echo")
    if options.get("prompt_embeds") is not None:
        raise bad_request(
            "prompt_embeds is not supported by this prefill–decode deployment: give prompt.",
            "prompt_embeds",
        )
    if options.get("kv_transfer_params") is not None:
        raise bad_request(
            "kv_transfer_params is set by the router: leave it out.", "kv_transfer_params"
        )
    return GenerateRequest(path, body, size, options)


def _refusal(name: str, value: object, valid: str) -> Exception:
    return bad_request(
        f"{name}={value!r} is not supported by this prefill–decode deployment: it must be {valid}.",
        name,
    )


def _prompt_size(body: RawBody) -> PromptSize:
    prompt = bytes(body.get("prompt", b"null"))
    if prompt == b"null":
        return PromptSize(0, _num_text(body, "messages") + _num_text(body, "tools"))
    first = _FIRST_ITEM.match(prompt)
    if first and first[1] in (b"[", b'"'):
        prompts = _READ_ITEMS.decode(prompt)
        if len(prompts) > 1:
            raise bad_request(
                f"prompt is a list of {len(prompts)} prompts: this prefill–decode deployment "
                "takes one prompt per request.",
                "prompt",
            )
        prompt = bytes(prompts[0])
        first = _FIRST_ITEM.match(prompt)
    if first:
        return PromptSize(0 if first[1] == b"]" else prompt.count(b",") + 1, 0)
    return PromptSize(0, _num_characters(msgspec.json.decode(prompt)))


def _num_text(body: RawBody, name: str) -> int:
    return _num_characters(msgspec.json.decode(body[name])) if name in body else 0


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
