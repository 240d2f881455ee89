"""The router's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from isochunk.pd.router.instances import Instance

OWN_TIME_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class RouterMetrics:
    """Counters of one router, with a registry of their own."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "isochunk_router_requests",
            "Requests by how they ended.",
            ["outcome"],
            registry=registry,
        )
        self.retries = Counter(
            "isochunk_router_retries",
            "Requests sent on to another server after a failure of this one.",
            ["role", "instance"],
            registry=registry,
        )
        self.untransferred = Counter(
            "isochunk_router_untransferred",
            "Prefill answers without KV transfer parameters: decode computed the prompt again.",
            ["instance"],
            registry=registry,
        )
        self.own_time = Histogram(
            "isochunk_router_own_seconds",
            "Time to the answer's headers less waiting for servers; requests without retries.",
            buckets=OWN_TIME_BUCKETS,
            registry=registry,
        )
        labels = ["role", "instance"]
        in_flight = Gauge(
            "isochunk_router_in_flight", "Requests at a server.", labels, registry=registry
        )
        tokens = Gauge(
            "isochunk_router_tokens_in_flight", "Their tokens.", labels, registry=registry
        )
        predicted = Gauge(
            "isochunk_router_predicted_prefill_ms",
            "Predicted remaining time of the prefills at a server; 0 without a latency model.",
            ["instance"],
            registry=registry,
        )
        modelled = Gauge(
            "isochunk_router_model_known",
            "1 if the server's latency model is known: its load is predicted time.",
            ["instance"],
            registry=registry,
        )
        up = Gauge("isochunk_router_up", "1 if the server is up.", labels, registry=registry)
        for instance in instances:
            # Read at scrape time: a gauge that is counted up and down could drift.
            where = (instance.role, instance.name)
            in_flight.labels(*where).set_function(lambda i=instance: len(i.legs))
            tokens.labels(*where).set_function(lambda i=instance: i.num_tokens)
            up.labels(*where).set_function(lambda i=instance: i.up)
            if instance.role == "prefill":
                predicted.labels(instance.name).set_function(instance.remaining_ms)
                modelled.labels(instance.name).set_function(lambda i=instance: bool(i.stages))

    def render(self) -> bytes:
        """Prometheus text."""
        text: bytes = generate_latest(self._registry)
        return text
