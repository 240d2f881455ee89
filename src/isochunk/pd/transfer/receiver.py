"""The decode side of one rank: claims a prompt's blocks and takes in what is pushed.

A request is received once every layer and head that this rank needs has been written, from
however many prefill ranks; the first fault fails it. Every prefill rank is told when this
rank is done, also those whose blocks it doesn't need.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from isochunk.pd.transfer import wire
from isochunk.pd.transfer.loop_thread import LoopThread
from isochunk.pd.transfer.shard import LayoutError, Piece, Rank, Shard, plan_pieces
from isochunk.pd.transfer.sockets import keep_alive

logger = logging.getLogger(__name__)

WriteBlocks = Callable[[str, Sequence[int], int, int, bytes], None]
"""(layer, block ids, first head on this rank, number of heads, their bytes)."""


class TransferError(RuntimeError):
    """The blocks cannot be had; the message says why."""


class Address(BaseModel):
    """Where a prefill rank listens, and the proof that one may have these blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: Rank
    host: str
    port: int = Field(gt=0, lt=65536)
    key: str


class RemoteBlocks(BaseModel):
    """A finished prompt on a prefill instance, as it travels in ``kv_transfer_params``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    remote_sequence: int = Field(ge=0)
    remote_num_tokens: int = Field(gt=0)
    remote_block_ids: tuple[int, ...] = Field(min_length=1)
    remote_addresses: tuple[Address, ...] = Field(min_length=1)


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    shard: Shard


@dataclass
class _Reception:
    """One request under way on the loop."""

    remote: RemoteBlocks
    is_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    block_ids: tuple[int, ...] = ()
    first_block: int = 0


class Receiver:
    """Fetches blocks into one rank's cache. All public methods are thread-safe.

    Args:
        shard: what this rank needs.
        write: writes blocks into the cache; called on the receiver's own thread.
        consumer: this rank's number among ``num_consumers`` of its instance.
        stall_timeout_s: seconds without progress after which a transfer has failed.
        changed: set whenever a request is received or has failed.
    """

    def __init__(
        self,
        shard: Shard,
        write: WriteBlocks,
        *,
        consumer: int,
        num_consumers: int,
        stall_timeout_s: float,
        changed: threading.Event,
    ) -> None:
        self._shard = shard
        self._write = write
        self._who = {"consumer": consumer, "num_consumers": num_consumers}
        self._timeout_s = stall_timeout_s
        self._changed = changed
        self._receptions: dict[str, _Reception] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._lock = threading.Lock()
        self._thread = LoopThread("kv-receiver")

    def claim(self, request_id: str, remote: RemoteBlocks) -> None:
        """Have the blocks kept for this request until it is fetched or released."""
        self._thread.call(self._claim, request_id, remote)

    def fetch(
        self, request_id: str, remote: RemoteBlocks, block_ids: Sequence[int], first_block: int
    ) -> None:
        """Fetch the prompt's blocks from ``first_block`` on into ``block_ids``."""
        self._thread.call(self._fetch, request_id, remote, tuple(block_ids), first_block)

    def release(self, request_id: str, remote: RemoteBlocks) -> None:
        """Let the blocks go without fetching them."""
        self._thread.call(self._fetch, request_id, remote, (), 0)

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests that came to an end since the last call, and those of them that failed."""
        with self._lock:
            ended, self._received = self._received | self._failed, set()
            failed, self._failed = self._failed, set()
        return ended, failed

    def close(self) -> None:
        """Drop everything under way."""
        self._thread.close()

    # -- on the loop -----------------------------------------------------------------------

    def _claim(self, request_id: str, remote: RemoteBlocks) -> None:
        if request_id not in self._receptions:
            self._receptions[request_id] = _Reception(remote)
            self._thread.spawn(self._receive(request_id))

    def _fetch(
        self, request_id: str, remote: RemoteBlocks, block_ids: tuple[int, ...], first_block: int
    ) -> None:
        self._claim(request_id, remote)
        reception = self._receptions[request_id]
        reception.block_ids, reception.first_block = block_ids, first_block
        reception.is_wanted.set()

    async def _receive(self, request_id: str) -> None:
        reception = self._receptions[request_id]
        try:
            failure: str | None = None
            try:
                await self._transfer(reception)
            except (TransferError, LayoutError, wire.ProtocolError) as error:
                failure = str(error)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                failure = f"connection to the prefill instance lost: {error!r}"
            except Exception as error:  # e.g. the cache can't be written
                logger.exception("KV transfer of %s failed", request_id)
                failure = repr(error)
            await reception.is_wanted.wait()  # a failed claim is reported when it matters
        finally:
            del self._receptions[request_id]
        if not reception.block_ids:
            return  # released
        if failure is not None:
            logger.error("KV transfer of %s failed: %s", request_id, failure)
        with self._lock:
            (self._received if failure is None else self._failed).add(request_id)
        self._changed.set()

    async def _transfer(self, reception: _Reception) -> None:
        opened: list[_Connection] = []
        try:
            tasks = [
                self._open(a, reception.remote, opened) for a in reception.remote.remote_addresses
            ]
            await _gather(tasks)
            await self._wait_until_wanted(reception, opened)
            if reception.block_ids:
                pieces = plan_pieces(self._shard, [c.shard for c in opened])
                await _gather(
                    [
                        self._take(connection, pieces[connection.shard.rank], reception)
                        for connection in opened
                        if connection.shard.rank in pieces
                    ]
                )
            for connection in opened:
                with suppress(OSError):  # its blocks have arrived already
                    await wire.send(connection.writer, {"done": True})
        finally:
            for connection in opened:
                connection.writer.close()

    async def _open(
        self, address: Address, remote: RemoteBlocks, opened: list[_Connection]
    ) -> None:
        """Connect, learn what the rank holds, and claim the blocks."""
        where = f"prefill rank {address.rank} at {address.host}:{address.port}"
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise TransferError(f"{where} cannot be reached: {error!r}") from None
        try:
            keep_alive(writer)
            hello, _ = await self._next(reader)
            try:
                shard = Shard.model_validate(hello.get("shard"))
            except ValueError as error:
                raise TransferError(f"{where} speaks another protocol: {error}") from None
            claim = {
                "claim": remote.remote_sequence,
                "block_ids": remote.remote_block_ids,
                "key": address.key,
                **self._who,
            }
            await wire.send(writer, claim)
            answer, _ = await self._next(reader)
            if "claimed" not in answer:
                raise TransferError(f"{where}: {answer.get('gone', answer)}")
        except BaseException:
            writer.close()
            raise
        opened.append(_Connection(reader, writer, shard))

    async def _wait_until_wanted(self, reception: _Reception, opened: list[_Connection]) -> None:
        """Until the engine names its blocks; a rank that goes meanwhile fails the transfer."""
        wanted = asyncio.ensure_future(reception.is_wanted.wait())
        losses = [asyncio.ensure_future(c.reader.read(1)) for c in opened]
        try:
            await asyncio.wait([wanted, *losses], return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                raise TransferError("a prefill rank closed its connection")
        finally:
            await _cancel([wanted, *losses])

    async def _take(self, connection: _Connection, piece: Piece, reception: _Reception) -> None:
        block_ids = reception.block_ids
        request: dict[str, Any] = {
            "fetch": piece.model_dump(),
            "first_block": reception.first_block,
            "num_blocks": len(block_ids),
        }
        await wire.send(connection.writer, request)
        missing = {layer: len(block_ids) for layer in piece.layers}
        first_head = piece.first_head - self._shard.first_head
        block_bytes = piece.num_heads * self._shard.head_bytes
        while True:
            header, data = await self._next(connection.reader)
            if "gone" in header:
                raise TransferError(str(header["gone"]))
            if "end" in header:
                break
            layer, start, count = header.get("layer"), header.get("block"), header.get("num_blocks")
            if layer not in missing or type(start) is not int or type(count) is not int:
                raise wire.ProtocolError(f"unexpected message {header}")
            ids = block_ids[start : start + count]
            if start < 0 or len(ids) != count or len(data) != count * block_bytes:
                raise wire.ProtocolError(f"blocks {start}+{count} with {len(data)} bytes")
            self._write(layer, ids, first_head, piece.num_heads, data)
            missing[layer] -= count
        if any(missing.values()):
            raise wire.ProtocolError(f"{sum(missing.values())} blocks did not arrive")

    async def _next(self, reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
        return await asyncio.wait_for(wire.receive(reader), self._timeout_s)


async def _gather(coroutines: list[Any]) -> None:
    """Run all; the first fault cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
