"""The prefill side of one rank: holds finished prompts' blocks and pushes them when asked.

A hold ends when every consumer rank has said that it is done, or when nobody has claimed it
for ``claim_timeout_s``. A claim lasts as long as its connection, so a decode instance that
queues a prompt keeps its blocks and one that dies gives them back.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from isochunk.pd.transfer import wire
from isochunk.pd.transfer.loop_thread import LoopThread
from isochunk.pd.transfer.shard import Piece, Shard
from isochunk.pd.transfer.sockets import keep_alive

logger = logging.getLogger(__name__)

ReadBlocks = Callable[[str, Sequence[int], int, int], memoryview]
"""(layer, block ids, first head on this rank, number of heads) -> their bytes."""

FRAME_BYTES = 8 << 20
_REMEMBERED = 4096


@dataclass
class _Hold:
    """A finished prompt's blocks; without a key, claimed before the engine has named them."""

    key: str = ""
    block_ids: tuple[int, ...] = ()
    is_known: asyncio.Event = field(default_factory=asyncio.Event)
    num_claims: int = 0
    done_consumers: set[int] = field(default_factory=set)
    expiry: asyncio.TimerHandle | None = None


class Sender:
    """Serves one rank's blocks. ``hold``, ``take_finished`` and ``close`` are thread-safe.

    Args:
        shard: what this rank has.
        read: reads blocks out of the cache; called on the sender's own thread.
        host: address to listen on.
        claim_timeout_s: seconds that unclaimed blocks are held.
        changed: set whenever a hold has ended.
    """

    def __init__(
        self,
        shard: Shard,
        read: ReadBlocks,
        *,
        host: str,
        claim_timeout_s: float,
        changed: threading.Event,
    ) -> None:
        self._shard = shard
        self._read = read
        self._claim_timeout_s = claim_timeout_s
        self._changed = changed
        self._holds: dict[str, _Hold] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._finished: set[str] = set()
        self._lock = threading.Lock()
        self._thread = LoopThread("kv-sender")
        self._server = self._thread.wait_for(self._listen(host))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def hold(self, request_id: str, key: str, block_ids: Sequence[int]) -> None:
        """Keep a finished prompt's blocks for consumers that know the key."""
        self._thread.call(self._hold, request_id, key, tuple(block_ids))

    def take_finished(self) -> set[str]:
        """Requests whose hold has ended since the last call; each is given once."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def close(self) -> None:
        """Stop listening and drop everything."""
        self._server.close()
        self._thread.close()

    # -- on the loop -----------------------------------------------------------------------

    async def _listen(self, host: str) -> asyncio.Server:
        return await asyncio.start_server(self._serve, host, 0)

    def _hold(self, request_id: str, key: str, block_ids: tuple[int, ...]) -> None:
        hold = self._holds.setdefault(request_id, _Hold())
        hold.key, hold.block_ids = key, block_ids
        hold.is_known.set()
        self._start_expiry(request_id, hold)

    def _start_expiry(self, request_id: str, hold: _Hold) -> None:
        if hold.num_claims == 0 and self._holds.get(request_id) is hold:
            loop = asyncio.get_running_loop()
            hold.expiry = loop.call_later(self._claim_timeout_s, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        if self._holds[request_id].is_known.is_set():
            logger.warning(
                "KV blocks of %s released: no decode instance claimed them within %g s",
                request_id,
                self._claim_timeout_s,
            )
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        hold = self._holds.pop(request_id)
        if hold.expiry is not None:
            hold.expiry.cancel()
        self._ended[request_id] = None
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        if hold.is_known.is_set():  # otherwise the engine holds nothing for it
            with self._lock:
                self._finished.add(request_id)
            self._changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer)
        try:
            await wire.send(writer, {"shard": self._shard.model_dump()})
            claim, _ = await asyncio.wait_for(wire.receive(reader), self._claim_timeout_s)
            await self._serve_claim(claim, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the claim has gone with its connection
        except (wire.ProtocolError, KeyError, TypeError, ValueError) as error:
            logger.warning("KV transfer connection closed: bad message: %r", error)
        finally:
            writer.close()

    async def _serve_claim(
        self, claim: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request_id, key = str(claim["claim"]), str(claim["key"])
        consumer, num_consumers = int(claim["consumer"]), int(claim["num_consumers"])
        if request_id in self._ended:
            await wire.send(writer, {"gone": "its blocks were released before the claim"})
            return
        hold = self._holds.setdefault(request_id, _Hold())
        hold.num_claims += 1
        if hold.expiry is not None:
            hold.expiry.cancel()
        try:
            # The answer to the client can be faster than the engine's next step.
            await asyncio.wait_for(hold.is_known.wait(), self._claim_timeout_s)
            if not hmac.compare_digest(hold.key.encode(), key.encode()):
                await wire.send(writer, {"gone": "wrong key"})
                return
            await wire.send(writer, {"claimed": request_id})
            while True:
                message, _ = await wire.receive(reader)
                if "done" in message:
                    hold.done_consumers.add(consumer)
                    break
                await self._push(hold, message, writer)
            if len(hold.done_consumers) >= num_consumers and request_id in self._holds:
                self._end(request_id)
        except TimeoutError:
            await wire.send(writer, {"gone": "this prefill instance has no such request"})
        finally:
            hold.num_claims -= 1
            if hold.is_known.is_set():
                self._start_expiry(request_id, hold)
            elif hold.num_claims == 0:
                self._holds.pop(request_id, None)

    async def _push(
        self, hold: _Hold, message: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        """Push the layers and heads of one piece, from the first wanted block on."""
        piece = Piece.model_validate(message["fetch"])
        first_block, num_blocks = int(message["first_block"]), int(message["num_blocks"])
        block_ids = hold.block_ids[first_block : first_block + num_blocks]
        if first_block < 0 or len(block_ids) != num_blocks:
            gone = f"blocks {first_block}+{num_blocks} of {len(hold.block_ids)} were asked for"
            await wire.send(writer, {"gone": gone})
            return
        head_bytes = piece.num_heads * self._shard.head_bytes
        step = max(FRAME_BYTES // max(head_bytes, 1), 1)
        first_head = piece.first_head - self._shard.first_head
        for layer in piece.layers:
            for start in range(0, num_blocks, step):
                ids = block_ids[start : start + step]
                data = self._read(layer, ids, first_head, piece.num_heads)
                header = {"layer": layer, "block": start, "num_blocks": len(ids)}
                await wire.send(writer, header, data)
        await wire.send(writer, {"end": True})
