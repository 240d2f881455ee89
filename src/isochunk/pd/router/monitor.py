"""Background watch over the servers: are they up, and what is their latency model."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import httpx

from isochunk.pd.router.connectors import KVConnector
from isochunk.pd.router.instances import Instance
from isochunk.pd.router.prediction import read_models
from isochunk.pd.router.settings import RouterSettings

logger = logging.getLogger(__name__)

DOWN_INTERVAL_S = 0.5


class Monitor:
    """Probes every server, and reads the latency models of prefill servers."""

    def __init__(
        self, client: httpx.AsyncClient, connector: KVConnector, settings: RouterSettings
    ) -> None:
        self._client = client
        self._connector = connector
        self._settings = settings

    async def probe(self, instance: Instance) -> None:
        """Ask /health once and note the answer."""
        asked_s = time.monotonic()
        instance.suspect.clear()
        try:
            answer = await self._client.get(
                f"{instance.address.url}/health", timeout=self._settings.health_timeout_s
            )
            up = answer.status_code == 200
            reason = f"/health answered {answer.status_code}"
        except (httpx.HTTPError, ValueError, OSError) as error:
            up = False
            reason = f"/health: {type(error).__name__}"
            if isinstance(error, httpx.TimeoutException):
                instance.give_up_unanswered()
        if up:
            instance.alive_s = asked_s
        if up and not instance.up:
            logger.info("%s %s is up", instance.role, instance.name)
        elif instance.up and not up:
            logger.warning("%s %s is down: %s", instance.role, instance.name, reason)
        instance.up = up
        if not up:
            self._connector.forget(instance.address)
            instance.set_stages(())

    async def watch_health(self, instance: Instance) -> None:
        """Probe for ever; at once where a request found the server failing."""
        while True:
            interval_s = self._settings.health_interval_s if instance.up else DOWN_INTERVAL_S
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await instance.suspect.wait()
            await self.probe(instance)

    async def watch_model(self, instance: Instance) -> None:
        """Read a prefill server's latency model for ever; without one, tokens decide."""
        while True:
            if instance.up:
                with suppress(httpx.HTTPError):
                    answer = await self._client.get(
                        f"{instance.address.url}/metrics", timeout=self._settings.health_timeout_s
                    )
                    if answer.status_code == 200:
                        instance.set_stages(read_models(answer.text.splitlines()))
            await asyncio.sleep(self._settings.model_interval_s)
