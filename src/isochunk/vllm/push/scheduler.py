"""The PushConnector in the scheduler's process: requests in, news for the workers out."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from pydantic import ValidationError
from vllm.v1.request import RequestStatus

from isochunk.pd.transfer.proof import sign
from isochunk.pd.transfer.receiver import Address, RemoteBlocks
from isochunk.pd.transfer.shard import Rank
from isochunk.vllm.push.connector import PushHandshake, PushMetadata

logger = logging.getLogger("vllm.isochunk.push")

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class PushScheduler:
    """Bookkeeping of both roles; a request is either one to hold for or one to fetch for."""

    def __init__(self, block_size: int, *, is_producer: bool = True, is_consumer: bool = True):
        self._block_size = block_size
        self._is_producer, self._is_consumer = is_producer, is_consumer
        self._places: dict[tuple[int, int], PushHandshake] = {}
        self._sequence = itertools.count()
        self._news = PushMetadata()
        # Requests whose remote blocks are claimed and not yet fetched or released.
        self._claimed: dict[str, RemoteBlocks] = {}

    def set_places(self, metadata: Any) -> None:
        """Where the prefill ranks listen, by (pp, tp) rank."""
        self._places = dict(sorted(metadata.items()))

    def take_metadata(self, is_idle: bool) -> PushMetadata:
        """News since the last call."""
        news, self._news = self._news, PushMetadata()
        news.is_idle = is_idle
        return news

    # -- decode side -----------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Claim what its parameters point to, if they make sense."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        if not self._is_consumer:
            logger.warning(
                "%s asks a kv_producer to fetch blocks; its prompt is computed here",
                request.request_id,
            )
            return
        is_release = getattr(request, "abort_immediately", False)  # vLLM's way to let it go
        try:
            remote = RemoteBlocks.model_validate(params)
        except ValidationError as error:
            logger.warning(
                "kv_transfer_params of %s are not from a PushConnector; its prompt is computed "
                "here: %s",
                request.request_id,
                "; ".join(f"{p['loc']}: {p['msg']}" for p in error.errors()),
            )
            return
        if is_release:
            self._news.releases[request.request_id] = remote
            return
        if remote.remote_num_tokens != request.num_prompt_tokens:
            logger.warning(
                "The prefill instance has %d tokens of %s, whose prompt has %d here; it is "
                "computed here",
                remote.remote_num_tokens,
                request.request_id,
                request.num_prompt_tokens,
            )
            self._news.releases[request.request_id] = remote
            return
        self._claimed[request.request_id] = remote
        self._news.claims[request.request_id] = remote

    def count_remote_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens, whether they come asynchronously)."""
        remote = self._claimed.get(request.request_id)
        if remote is None:
            return 0, False
        num_tokens = remote.remote_num_tokens - num_computed_tokens
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def on_allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Fetch what isn't in this instance's prefix cache."""
        remote = self._claimed.pop(request.request_id, None)
        if remote is None:
            return
        if num_external_tokens <= 0:  # all of it is
            self._news.releases[request.request_id] = remote
            return
        first_token = remote.remote_num_tokens - num_external_tokens
        first_block = first_token // self._block_size
        num_blocks = -(-remote.remote_num_tokens // self._block_size)
        block_ids = blocks.get_block_ids()[0][first_block:num_blocks]
        self._news.fetches[request.request_id] = (remote, block_ids, first_block)

    # -- prefill side, and aborts of both --------------------------------------------------

    def on_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        """(whether blocks stay held, parameters for the decode instance)."""
        remote = self._claimed.pop(request.request_id, None)
        if remote is not None:  # aborted before it was its turn
            self._news.releases[request.request_id] = remote
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return False, None
        if request.status not in _COMPLETE or not block_ids:
            return False, None
        if not self._is_producer:
            logger.warning("%s asks a kv_consumer to hold its blocks", request.request_id)
            return False, None
        sequence = next(self._sequence)
        self._news.holds.append((sequence, request.request_id))
        handed_over = RemoteBlocks(
            remote_sequence=sequence,
            remote_num_tokens=request.num_prompt_tokens,
            remote_block_ids=tuple(block_ids),
            remote_addresses=tuple(
                Address(
                    rank=Rank(pp=pp, tp=tp),
                    host=place.host,
                    port=place.port,
                    key=sign(place.secret, sequence, block_ids),
                )
                for (pp, tp), place in self._places.items()
            ),
        )
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **handed_over.model_dump(),
        }
