"""How a KV transfer is asked for: what goes to the prefill and to the decode server.

NIXL (push and pull) and this package's push connector: the prefill server's answer says
where the blocks are. Mooncake: the router makes up a transfer id, and the prefill
server's registry says which engine has it. Written from vLLM 0.32's connectors and from
vLLM-Ascend's proxy example.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import httpx
import msgspec

from isochunk.pd.router.request import RawBody
from isochunk.pd.router.settings import Address, KVConnectorName

DATA_PARALLEL_RANK = "X-data-parallel-rank"
"""Header by which vLLM's API server chooses the engine of a request."""


class TransferStart(Protocol):
    """A transfer whose prefill has been asked for."""

    prefill_params: dict[str, Any]
    prefill_headers: dict[str, str]

    def decode_params(self, prefilled: Mapping[str, Any]) -> dict[str, Any] | None:
        """For the decode server, from the prefill answer; None where nothing was kept."""


class KVConnector(Protocol):
    """One way to transfer KV blocks."""

    async def start(self, prefiller: Address, request_id: str) -> TransferStart:
        """Prepare a transfer from ``prefiller``."""

    def forget(self, prefiller: Address) -> None:
        """The server went away; another engine may answer there next."""


def make_connector(name: KVConnectorName, client: httpx.AsyncClient) -> KVConnector:
    """The strategy for ``--kv-connector``."""
    return Mooncake(client) if name == "mooncake" else AnswerCarriesParams()


class AnswerCarriesParams:
    """NIXL and our push connector."""

    async def start(self, prefiller: Address, request_id: str) -> TransferStart:
        """Nothing to prepare."""
        return _AnsweredTransfer()

    def forget(self, prefiller: Address) -> None:
        """Nothing is kept."""


class _AnsweredTransfer:
    def __init__(self) -> None:
        self.prefill_headers: dict[str, str] = {}
        self.prefill_params: dict[str, Any] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(self, prefilled: Mapping[str, Any]) -> dict[str, Any] | None:
        params: dict[str, Any] | None = prefilled.get("kv_transfer_params")
        return params or None


class Mooncake:
    """vLLM's MooncakeConnector; written from its source."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._engines: dict[Address, dict[str, str]] = {}  # -> data-parallel rank: engine id
        self._turn = itertools.count()

    async def start(self, prefiller: Address, request_id: str) -> TransferStart:
        """Ask the registry for the engines once, and choose one by round robin.

        Raises:
            httpx.HTTPError: the registry can't be reached or doesn't answer as expected.
        """
        if prefiller not in self._engines:
            answer = await self._client.get(f"{prefiller.bootstrap_url}/query", timeout=5.0)
            answer.raise_for_status()
            self._engines[prefiller] = _engine_ids(answer.content)
        engines = self._engines[prefiller]
        rank = sorted(engines)[next(self._turn) % len(engines)]
        # One registered engine is the only one behind that server: no need to choose it.
        headers = {DATA_PARALLEL_RANK: rank} if len(engines) > 1 else {}
        return _MooncakeTransfer(
            f"xfer-{uuid.uuid4().hex}", engines[rank], prefiller.bootstrap_url, headers
        )

    def forget(self, prefiller: Address) -> None:
        """Ask the registry again next time."""
        self._engines.pop(prefiller, None)


def _engine_ids(content: bytes) -> dict[str, str]:
    try:
        engines = {rank: str(entry["engine_id"]) for rank, entry in json.loads(content).items()}
    except (ValueError, AttributeError, KeyError, TypeError):
        raise httpx.HTTPError("not the answer of a Mooncake registry") from None
    if not engines:
        raise httpx.HTTPError("no engine has registered yet")
    return engines


class _MooncakeTransfer:
    def __init__(
        self, transfer_id: str, engine_id: str, bootstrap_url: str, headers: dict[str, str]
    ) -> None:
        self.prefill_headers = headers
        self.prefill_params: dict[str, Any] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
        self._decode_params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": bootstrap_url,
            "transfer_id": transfer_id,
        }

    def decode_params(self, prefilled: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._decode_params


def prefill_body(body: RawBody, transfer: TransferStart) -> bytes:
    """The client's request, cut down to its prefill.

    min_tokens = 1 keeps an end-of-sequence token or a stop token from being sampled: a
    prefill that ends that way instead of by its length releases its blocks in some
    connectors (Mooncake's) before they were sent.
    """
    prefill: dict[str, Any] = {k: value for k, value in body.items() if k != "stream_options"}
    prefill |= {"max_tokens": 1, "min_tokens": 1, "stream": False}
    if bytes(body.get("max_completion_tokens", b"null")) != b"null":
        prefill["max_completion_tokens"] = 1
    return msgspec.json.encode(prefill | {"kv_transfer_params": transfer.prefill_params})


def decode_body(body: RawBody, params: dict[str, Any] | None) -> bytes:
    """The client's request as it came, with where its KV blocks are."""
    return msgspec.json.encode(body if params is None else {**body, "kv_transfer_params": params})
