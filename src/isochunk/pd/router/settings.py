"""Settings of the router."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
KVConnectorName = Literal["push", "nixl", "mooncake"]

MOONCAKE_BOOTSTRAP_PORT = 8998
"""vLLM's default of VLLM_MOONCAKE_BOOTSTRAP_PORT."""


class Address(BaseModel):
    """Where one vLLM server listens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(min_length=1)
    port: Port
    bootstrap_port: Port = MOONCAKE_BOOTSTRAP_PORT
    """Of Mooncake's registry; prefill servers with that connector only."""

    @property
    def name(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        return f"{self._url_host}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.name}"

    @property
    def bootstrap_url(self) -> str:
        """Base URL of Mooncake's registry."""
        return f"http://{self._url_host}:{self.bootstrap_port}"

    @property
    def _url_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


class RouterSettings(BaseModel):
    """What the router forwards to and how long it waits.

    Raises:
        pydantic.ValidationError: a value is out of range or an address is given twice.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefillers: tuple[Address, ...] = Field(min_length=1)
    decoders: tuple[Address, ...] = Field(min_length=1)
    kv_connector: KVConnectorName = "push"
    host: str = "127.0.0.1"
    port: Port = 8000
    connect_timeout_s: Seconds = 3.0
    prefill_timeout_s: Seconds = 600.0
    """For the whole prefill, queueing on the prefill server included."""
    decode_timeout_s: Seconds = 1800.0
    """Longest silence of a decode server; for a plain answer that is the whole generation."""
    health_interval_s: Seconds = 2.0
    health_timeout_s: Seconds = 6.0
    """A server that doesn't answer /health for so long counts as down."""
    model_interval_s: Seconds = 5.0
    """How often the latency model is read from a prefill server's /metrics."""
    shutdown_timeout_s: Seconds = 10.0
    """How long requests in flight may go on after SIGTERM."""

    @model_validator(mode="after")
    def _addresses_differ(self) -> RouterSettings:
        names = Counter(a.name for a in (*self.prefillers, *self.decoders))
        names[Address(host=self.host, port=self.port).name] += 1
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(
                f"{twice[0]} is given more than once: each prefiller, each decoder and the "
                "router itself need an address of their own"
            )
        return self
