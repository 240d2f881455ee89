"""The prefill side of one rank: holds finished prompts' blocks and pushes them when asked.

A hold ends when every consumer rank has said that it is done, or when nobody has claimed it
for ``claim_timeout_s``. A claim lasts as long as its connection, so a decode instance that
queues a prompt keeps its blocks and one that dies gives them back; one that is stuck loses the
connection after ``queue_timeout_s``.

The client's way to a decode instance can be faster than the engine's next step, which tells
this rank of the hold and waits for chunks of other prompts. Claims therefore carry block ids
with a proof and are served at once: prompts are numbered in the order in which they are held,
so a number above all held ones is still to come, and one below that isn't held is gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from isochunk.pd.transfer import wire
from isochunk.pd.transfer.loop_thread import LoopThread
from isochunk.pd.transfer.proof import is_signed, new_secret
from isochunk.pd.transfer.shard import Piece, Shard
from isochunk.pd.transfer.sockets import keep_alive

logger = logging.getLogger(__name__)

ReadBlocks = Callable[[str, Sequence[int], int, int], memoryview]
"""(layer, block ids, first head on this rank, number of heads) -> their bytes."""

FRAME_BYTES = 8 << 20


@dataclass
class _Hold:
    """A prompt's blocks; without a request id, claimed before the engine has told of it."""

    request_id: str | None = None
    num_claims: int = 0
    done_consumers: set[int] = field(default_factory=set)
    num_consumers: int = 1
    expiry: asyncio.TimerHandle | None = None


class Sender:
    """Serves one rank's blocks. ``hold``, ``take_finished`` and ``close`` are thread-safe.

    Args:
        shard: what this rank has.
        read: reads blocks out of the cache; called on the sender's own thread.
        host: address to listen on.
        claim_timeout_s: seconds that unclaimed blocks are held.
        queue_timeout_s: seconds that claimed blocks are held while nothing is fetched.
        changed: set whenever a hold has ended.
    """

    def __init__(
        self,
        shard: Shard,
        read: ReadBlocks,
        *,
        host: str,
        claim_timeout_s: float,
        queue_timeout_s: float,
        changed: threading.Event,
    ) -> None:
        self._shard = shard
        self._read = read
        self._claim_timeout_s = claim_timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._changed = changed
        self._holds: dict[int, _Hold] = {}
        self._last_held = -1
        self._finished: set[str] = set()
        self._lock = threading.Lock()
        self._thread = LoopThread("kv-sender")
        self._server = self._thread.wait_for(self._listen(host))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.secret = new_secret()

    def hold(self, sequence: int, request_id: str) -> None:
        """A prompt's blocks are held by the engine from here on; numbers only grow."""
        self._thread.call(self._hold, sequence, request_id)

    def take_finished(self) -> set[str]:
        """Requests whose hold has ended since the last call; each is given once."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def close(self) -> None:
        """Stop listening and drop everything."""
        self._thread.call(self._server.close)
        self._thread.close()

    # -- on the loop -----------------------------------------------------------------------

    async def _listen(self, host: str) -> asyncio.Server:
        return await asyncio.start_server(self._serve, host, 0)

    def _hold(self, sequence: int, request_id: str) -> None:
        self._last_held = max(self._last_held, sequence)
        hold = self._holds.setdefault(sequence, _Hold())
        hold.request_id = request_id
        self._settle(sequence, hold)

    def _settle(self, sequence: int, hold: _Hold) -> None:
        """End the hold if everybody is done; let it expire if nobody claims it."""
        if hold.request_id is None or self._holds.get(sequence) is not hold:
            return  # the engine hasn't told of it yet, or it has ended
        if len(hold.done_consumers) >= hold.num_consumers:
            self._end(sequence, hold.request_id)
        elif hold.num_claims == 0:
            loop = asyncio.get_running_loop()
            hold.expiry = loop.call_later(
                self._claim_timeout_s, self._expire, sequence, hold.request_id
            )

    def _expire(self, sequence: int, request_id: str) -> None:
        logger.warning(
            "KV blocks of %s released: no decode instance claimed them within %g s",
            request_id,
            self._claim_timeout_s,
        )
        self._end(sequence, request_id)

    def _end(self, sequence: int, request_id: str) -> None:
        del self._holds[sequence]
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
        sequence, block_ids = int(claim["claim"]), tuple(map(int, claim["block_ids"]))
        consumer, num_consumers = int(claim["consumer"]), int(claim["num_consumers"])
        if not is_signed(self.secret, sequence, block_ids, str(claim["key"])):
            await wire.send(writer, {"gone": "the key is not that of these blocks"})
            return
        if sequence <= self._last_held and sequence not in self._holds:
            await wire.send(writer, {"gone": "its blocks were released before the claim"})
            return
        hold = self._holds.setdefault(sequence, _Hold())
        hold.num_consumers = num_consumers
        hold.num_claims += 1
        if hold.expiry is not None:
            hold.expiry.cancel()
        try:
            await wire.send(writer, {"claimed": sequence})
            while True:
                async with asyncio.timeout(self._queue_timeout_s):
                    message, _ = await wire.receive(reader)
                if "done" in message:
                    hold.done_consumers.add(consumer)
                    break
                await self._push(block_ids, message, writer)
        finally:
            hold.num_claims -= 1
            self._settle(sequence, hold)

    async def _push(
        self, held: tuple[int, ...], message: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        """Push the layers and heads of one piece, from the first wanted block on."""
        piece = Piece.model_validate(message["fetch"])
        first_block, num_blocks = int(message["first_block"]), int(message["num_blocks"])
        block_ids = held[first_block : first_block + num_blocks]
        if first_block < 0 or len(block_ids) != num_blocks:
            gone = f"blocks {first_block}+{num_blocks} of {len(held)} were asked for"
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
                async with asyncio.timeout(self._claim_timeout_s):
                    await wire.send(writer, header, data)
        await wire.send(writer, {"end": True})
