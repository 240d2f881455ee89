"""``PushConnector``: load it with ``kv_connector_module_path=isochunk.vllm.push.connector``.

Any pipeline- and tensor-parallel sizes on both sides, one attention KV cache group. Made for
what no stock connector does yet: run a whole prefill/decode deployment on CPUs. The blocks
move as described in ``isochunk.pd.transfer``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from isochunk.config import ConfigError
from isochunk.pd.transfer.receiver import RemoteBlocks


class PushSettings(BaseModel):
    """``kv_connector_extra_config`` of the PushConnector."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="the address where prefill ranks listen")
    claim_timeout_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="a number of seconds > 0"
    )
    queue_timeout_s: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="a number of seconds > 0"
    )
    stall_timeout_s: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="a number of seconds > 0"
    )


@dataclass
class PushMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers in one step."""

    is_idle: bool = False
    holds: list[tuple[int, str]] = field(default_factory=list)
    claims: dict[str, RemoteBlocks] = field(default_factory=dict)
    fetches: dict[str, tuple[RemoteBlocks, list[int], int]] = field(default_factory=dict)
    releases: dict[str, RemoteBlocks] = field(default_factory=dict)


@dataclass
class PushHandshake(KVConnectorHandshakeMetadata):
    """Where a worker listens, and what its scheduler signs block ids with."""

    host: str
    port: int
    secret: bytes


class PushConnector(KVConnectorBase_V1):
    """What vLLM constructs, once in the scheduler's process and once in each worker.

    Raises:
        ConfigError: a setting in ``kv_connector_extra_config`` is unknown or out of range.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = _settings(self._kv_transfer_config.kv_connector_extra_config)
        # Each side imports only what it needs.
        if role is KVConnectorRole.SCHEDULER:
            from isochunk.vllm.push.scheduler import PushScheduler  # noqa: PLC0415

            self._scheduler = PushScheduler(
                vllm_config.cache_config.block_size,
                is_producer=self._kv_transfer_config.is_kv_producer,
                is_consumer=self._kv_transfer_config.is_kv_consumer,
            )
        else:
            from isochunk.vllm.push.worker import PushWorker  # noqa: PLC0415

            self._worker = PushWorker(vllm_config, kv_cache_config, settings)

    # -- in the scheduler's process --------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Where the workers listen, by (pp, tp) rank."""
        self._scheduler.set_places(metadata)

    def on_new_request(self, request: Any) -> None:
        """A request has arrived: claim its blocks before it has waited its turn."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Prompt tokens to be had from the prefill instance, always asynchronously."""
        return self._scheduler.count_remote_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request's own blocks are known: fetch into them."""
        self._scheduler.on_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PushMetadata:
        """All news of this step."""
        return self._scheduler.take_metadata(scheduler_output.total_num_scheduled_tokens == 0)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A prefill's blocks are held from here on; an aborted decode releases them."""
        return self._scheduler.on_finished(request, block_ids)

    # -- in a worker -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache exists: start to listen."""
        self._worker.start(kv_caches)

    def get_handshake_metadata(self) -> PushHandshake | None:
        """Where this worker listens, if it is a prefill worker."""
        return self._worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Hand this step's news to the transfer threads, before the forward runs."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PushMetadata)
        self._worker.apply(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: vLLM calls it after the forward, which on a CPU is a whole chunk later."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What the transfer threads have finished."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PushMetadata)
        return self._worker.take_results(metadata.is_idle)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is only scheduled once its blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are read after the prefill."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def shutdown(self) -> None:
        """End the transfer threads."""
        if self._role is KVConnectorRole.WORKER:
            self._worker.close()


def _settings(extra: dict[str, Any]) -> PushSettings:
    try:
        return PushSettings(**extra)
    except ValidationError as error:
        fields = PushSettings.model_fields
        lines = []
        for problem in error.errors():
            name = str(problem["loc"][0])
            known = ", ".join(fields)
            valid = fields[name].description if name in fields else f"one of {known}"
            lines.append(
                f"kv_connector_extra_config.{name}={problem['input']!r} is not valid: "
                f"expected {valid}"
            )
        raise ConfigError("; ".join(lines)) from None
