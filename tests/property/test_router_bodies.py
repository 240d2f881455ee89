"""A request passes the router as the client wrote it, whatever it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.pd.router.connectors import decode_body, prefill_body
from isochunk.pd.router.errors import RouterError
from isochunk.pd.router.request import PromptSize, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TOKEN_IDS = st.lists(st.integers(0, 2**31), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
).filter(lambda value: "inf" not in repr(value).lower())
PROMPTS = st.one_of(TEXT, TOKEN_IDS, st.lists(TEXT, max_size=2), st.lists(TOKEN_IDS, max_size=2))
INDENTS = st.sampled_from([None, 1])


@dataclass
class Transfer:
    """Any transfer."""

    prefill_params: dict[str, Any]
    prefill_headers: dict[str, str]

    def decode_params(self, prefilled: Mapping[str, Any]) -> dict[str, Any] | None:
        raise NotImplementedError


TRANSFER = Transfer({"do_remote_decode": True, "remote_host": "hôte"}, {})


@given(
    st.dictionaries(TEXT, JSON, max_size=4),
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 99)},
        optional={"max_completion_tokens": st.none() | st.integers(1, 99), "stream_options": JSON},
    ),
    INDENTS,
    st.booleans(),
)
def test_every_field_reaches_both_servers(
    more: dict[str, Any], own: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    body = {"prompt": "Hello", **more, **own}
    request = parse(
        "/v1/completions", json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode()
    )
    params = {"remote_block_ids": [[1, 2]], "remote_host": "::1"}
    assert json.loads(decode_body(request.body, None)) == body
    assert json.loads(decode_body(request.body, params)) == body | {"kv_transfer_params": params}

    expected = body | {"max_tokens": 1, "min_tokens": 1, "stream": False}
    expected.pop("stream_options", None)
    if expected.get("max_completion_tokens") is not None:
        expected["max_completion_tokens"] = 1
    expected["kv_transfer_params"] = TRANSFER.prefill_params
    assert json.loads(prefill_body(request.body, TRANSFER)) == expected


@given(PROMPTS, INDENTS, st.booleans())
def test_the_size_of_a_prompt(prompt: Any, indent: int | None, ascii_only: bool) -> None:
    content = json.dumps({"prompt": prompt}, indent=indent, ensure_ascii=ascii_only).encode()
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    if several:
        with pytest.raises(RouterError, match="one prompt per request"):
            parse("/v1/completions", content)
        return
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    size = PromptSize(0, len(prompt)) if isinstance(prompt, str) else PromptSize(len(prompt), 0)
    assert parse("/v1/completions", content).prompt == size


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_is_a_request_or_a_bad_request(content: bytes) -> None:
    with suppress(RouterError):
        parse("/v1/completions", content)
