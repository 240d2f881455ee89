"""The PushConnector in a worker: this rank's cache, its sender and its receiver."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from isochunk.log_output import log_like
from isochunk.pd.transfer.receiver import Receiver
from isochunk.pd.transfer.sender import Sender
from isochunk.pd.transfer.shard import LayoutError, Rank, Shard, heads_of_rank
from isochunk.vllm.push.connector import PushHandshake, PushMetadata, PushSettings

IDLE_WAIT_S = 0.002
"""How long a step without tokens waits for a transfer. vLLM steps all the time while one is
under way; without a wait those steps take the cores that the transfer needs."""


class PagedCache:
    """Reads and writes blocks of layers: tensors of (block, KV head, token, bytes or values)."""

    def __init__(self, layers: dict[str, torch.Tensor], num_blocks: int) -> None:
        shapes = {tuple(t.shape[1:]) for t in layers.values() if isinstance(t, torch.Tensor)}
        if len(shapes) != 1 or len(next(iter(shapes))) != 3:
            raise LayoutError(
                f"KV cache layers of shapes {sorted(shapes)}: the PushConnector moves models "
                "with one attention cache of (block, head, token, value) only"
            )
        self._layers = layers
        self.example = next(iter(layers.values()))
        # A block of the scheduler may be several of the attention kernel's.
        self._kernel_blocks = self.example.shape[0] // num_blocks
        self.head_bytes = self.example[0, 0].nbytes * self._kernel_blocks

    def read(
        self, layer: str, block_ids: Sequence[int], first_head: int, num_heads: int
    ) -> memoryview:
        """Blocks of some heads as bytes."""
        cache = self._layers[layer][:, first_head : first_head + num_heads]
        blocks = cache[self._index(block_ids)].cpu()
        return memoryview(blocks.view(torch.uint8).numpy().reshape(-1))

    def write(
        self, layer: str, block_ids: Sequence[int], first_head: int, num_heads: int, data: bytes
    ) -> None:
        """Put such bytes into blocks, and wait until they are there."""
        cache = self._layers[layer][:, first_head : first_head + num_heads]
        index = self._index(block_ids)
        values = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(cache.dtype)
        cache[index] = values.view(len(index), *cache.shape[1:]).to(cache.device)
        if cache.device.type != "cpu":
            torch.accelerator.synchronize(cache.device)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        first = torch.tensor(block_ids, device=self.example.device) * self._kernel_blocks
        inside = torch.arange(self._kernel_blocks, device=self.example.device)
        return (first[:, None] + inside).reshape(-1)


class PushWorker:
    """Starts with the KV cache; a producer sends, a consumer receives."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: PushSettings) -> None:
        self._config = vllm_config
        self._cache_config = kv_cache_config
        self._settings = settings
        self._changed = threading.Event()
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        log_like("vllm")  # for the transfer threads

    @property
    def handshake(self) -> PushHandshake | None:
        """Where the sender listens."""
        if self._sender is None:
            return None
        return PushHandshake(self._settings.host, self._sender.port, self._sender.secret)

    def start(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the threads this role needs."""
        cache = PagedCache(kv_caches, self._cache_config.num_blocks)
        shard = self._describe(cache, tuple(kv_caches))
        transfer = self._config.kv_transfer_config
        if transfer.is_kv_producer:
            self._sender = Sender(
                shard,
                cache.read,
                host=self._settings.host,
                claim_timeout_s=self._settings.claim_timeout_s,
                queue_timeout_s=self._settings.queue_timeout_s,
                changed=self._changed,
            )
        if transfer.is_kv_consumer:
            tp_size = get_tp_group().world_size
            self._receiver = Receiver(
                shard,
                cache.write,
                consumer=shard.rank.pp * tp_size + shard.rank.tp,
                num_consumers=tp_size * get_pp_group().world_size,
                stall_timeout_s=self._settings.stall_timeout_s,
                changed=self._changed,
            )

    def _describe(self, cache: PagedCache, layers: tuple[str, ...]) -> Shard:
        tp = get_tp_group()
        parallel = self._config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if (size := getattr(parallel, name, 1)) > 1:
                raise LayoutError(f"{name}={size} spreads a block over ranks; the push needs 1")
        num_heads = cache.example.shape[1]
        total = self._config.model_config.get_total_num_kv_heads()
        is_latent = self._config.model_config.use_mla
        heads = heads_of_rank(1 if is_latent else total, tp.rank_in_group, tp.world_size)
        if len(heads) != num_heads:
            raise LayoutError(
                f"{num_heads} KV heads on this rank where {len(heads)} of {total} are expected"
            )
        return Shard(
            rank=Rank(pp=get_pp_group().rank_in_group, tp=tp.rank_in_group),
            layers=layers,
            first_head=heads.start,
            num_heads=num_heads,
            total_heads=1 if is_latent else total,
            block_size=self._config.cache_config.block_size,
            head_bytes=cache.head_bytes,
            storage=f"{cache.example.dtype} {tuple(cache.example.shape[2:])} on "
            f"{cache.example.device.type}",
        )

    def apply(self, metadata: PushMetadata) -> None:
        """Pass this step's news on."""
        if self._sender is not None:
            for sequence, request_id in metadata.holds:
                self._sender.hold(sequence, request_id)
        if self._receiver is not None:
            for request_id, remote in metadata.claims.items():
                self._receiver.claim(request_id, remote)
            for request_id, (remote, block_ids, first_block) in metadata.fetches.items():
                self._receiver.fetch(request_id, remote, block_ids, first_block)
            for request_id, remote in metadata.releases.items():
                self._receiver.release(request_id, remote)

    def take_results(self, is_idle: bool) -> KVConnectorTransferResults:
        """What has come to an end; a step without tokens waits a moment for it."""
        if is_idle:
            self._changed.wait(IDLE_WAIT_S)
        self._changed.clear()
        results = KVConnectorTransferResults()
        if self._sender is not None:
            results.finished_sending = self._sender.take_finished()
        if self._receiver is not None:
            results.finished_recving, results.failed_recving = self._receiver.take_results()
        return results

    def close(self) -> None:
        """End the threads."""
        for thread in (self._sender, self._receiver):
            if thread is not None:
                thread.close()
