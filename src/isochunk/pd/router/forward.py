"""One request's way: prefill on one server, then decode on another, to the client."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import Send

from isochunk.pd.router.connectors import KVConnector, decode_body, prefill_body
from isochunk.pd.router.errors import RouterError, bad_gateway, unavailable
from isochunk.pd.router.headers import RawHeaders, to_client
from isochunk.pd.router.instances import Instance, Pool, SilentServerError
from isochunk.pd.router.metrics import RouterMetrics
from isochunk.pd.router.prediction import TokenEstimate
from isochunk.pd.router.request import GenerateRequest
from isochunk.pd.router.settings import RouterSettings

logger = logging.getLogger(__name__)

NO_PREFILL = "No prefill server is available."
NO_DECODE = "No decode server is available."
LOST = "The decode server went away before the answer was complete."
SILENT = "The decode server sent nothing for {:g} s."


@dataclass(frozen=True)
class Shared:
    """What all requests of a router use."""

    settings: RouterSettings
    transport: httpx.AsyncBaseTransport
    """Without a client around it: cookies and redirects took a fifth of the router's time."""
    connector: KVConnector
    prefillers: Pool
    decoders: Pool
    estimate: TokenEstimate
    metrics: RouterMetrics


@dataclass(frozen=True)
class Prefilled:
    """A finished prefill whose KV blocks wait for a decode server."""

    request_id: str
    kv_params: dict[str, Any] | None
    num_prompt_tokens: float


class Forwarding:
    """Forwards one request; ``outcome`` says how it ended."""

    def __init__(
        self, shared: Shared, request: GenerateRequest, headers: RawHeaders, request_id: str
    ) -> None:
        self.outcome = "client_closed"
        self._shared = shared
        self._request = request
        self._headers = headers
        self._request_id = request_id
        self._num_prefills = 0
        self._failed: set[Instance] = set()
        self._arrived_s = time.perf_counter()
        self._waited_s = 0.0

    async def run(self, send: Send) -> None:
        """Prefill, decode, and answer; again elsewhere while the client has seen nothing.

        Raises:
            RouterError: an answer that no server gave.
        """
        decoders = self._shared.decoders
        failure = unavailable(NO_DECODE)
        prefilled: Prefilled | None = None
        while decoders.available(self._failed):
            if prefilled is None:
                prefilled = await self._prefill(send)
                if prefilled is None:
                    return
            num_tokens = prefilled.num_prompt_tokens + self._request.max_output_tokens
            decoder = decoders.pick(num_tokens, self._failed)
            if decoder is None:
                break
            try:
                await self._decode(decoder, prefilled, num_tokens, send)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                # It never had the request: the KV blocks still wait for whoever comes.
                decoder.mark_down()
                failure = unavailable(NO_DECODE)
            except (httpx.ReadTimeout, httpx.WriteTimeout):
                decoder.suspect.set()
                timeout_s = self._shared.settings.decode_timeout_s
                raise RouterError(
                    504, SILENT.format(timeout_s), "GatewayTimeoutError", outcome="decode_failed"
                ) from None
            except (httpx.HTTPError, SilentServerError):
                # It may have taken the KV blocks: another server needs a new prefill.
                decoder.mark_down()
                failure = bad_gateway(LOST)
                prefilled = None
            except _BusyError:
                decoder.suspect.set()
                failure = unavailable(NO_DECODE)
                prefilled = None
            else:
                return
            self._note_failure(decoder)
        raise failure

    async def _prefill(self, send: Send) -> Prefilled | None:
        """None if a server refused the request: the client has its answer then."""
        shared = self._shared
        num_tokens = shared.estimate.num_tokens(self._request.prompt)
        while (prefiller := shared.prefillers.pick(num_tokens, self._failed)) is not None:
            # A server that failed may still hold the first try's blocks under its id.
            request_id = self._request_id + (f"-{self._num_prefills}" * (self._num_prefills > 0))
            self._num_prefills += 1
            try:
                with prefiller.leg(num_tokens) as leg:
                    waiting_s = time.perf_counter()
                    async with leg.waiting(shared.settings.prefill_timeout_s):
                        transfer = await shared.connector.start(prefiller.address, request_id)
                        body = prefill_body(self._request.body, transfer)
                        response = await self._send_upstream(
                            prefiller, body, request_id, transfer.prefill_headers
                        )
                        try:
                            await response.aread()
                        finally:
                            await response.aclose()
                    self._waited_s += time.perf_counter() - waiting_s
                if 400 <= response.status_code < 500:
                    await self._send_whole(response, send)
                    return None
                if response.status_code == 200:
                    answer = response.json()
                    num_tokens = answer["usage"]["prompt_tokens"]
                    shared.estimate.learn(self._request.prompt, num_tokens)
                    params = transfer.decode_params(answer)
                    self._note_transfer(prefiller, kept=params is not None)
                    return Prefilled(request_id, params, num_tokens)
                reason = f"answered {response.status_code}"
                prefiller.suspect.set()
            except TimeoutError:
                prefiller.suspect.set()
                raise RouterError(
                    504,
                    f"The prefill took longer than {shared.settings.prefill_timeout_s:g} s.",
                    "GatewayTimeoutError",
                    outcome="prefill_failed",
                ) from None
            except (httpx.TransportError, SilentServerError) as error:
                reason = type(error).__name__
                prefiller.mark_down()
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                reason = f"not a prefill server's answer ({type(error).__name__})"
                prefiller.suspect.set()
            logger.warning("prefill of %s at %s failed: %s", request_id, prefiller.name, reason)
            self._note_failure(prefiller)
        raise unavailable(NO_PREFILL)

    async def _decode(
        self, decoder: Instance, prefilled: Prefilled, num_tokens: float, send: Send
    ) -> None:
        body = decode_body(self._request.body, prefilled.kv_params)
        with decoder.leg(num_tokens) as leg:
            waiting_s = time.perf_counter()
            async with leg.waiting(None):
                response = await self._send_upstream(decoder, body, prefilled.request_id, {})
            try:
                is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                if not is_stream:
                    await response.aread()
                self._waited_s += time.perf_counter() - waiting_s
                if response.status_code == 503:
                    raise _BusyError
                if response.status_code >= 500 or response.status_code < 200:
                    decoder.suspect.set()
                    raise bad_gateway("The decode server failed.")
                if is_stream:
                    await self._relay_events(decoder, response, send)
                else:
                    await self._send_whole(response, send)
            finally:
                await response.aclose()

    async def _relay_events(self, decoder: Instance, response: httpx.Response, send: Send) -> None:
        """Whole events only, so that an error event can follow whatever was sent."""
        await self._start(response, send)
        pending = b""
        outcome = "ok"
        try:
            async for data in response.aiter_raw():
                head, separator, pending = (pending + data).rpartition(b"\n\n")
                if separator:
                    await _send_body(send, head + separator)
        except httpx.HTTPError as error:
            outcome = "decode_lost"
            if isinstance(error, httpx.TimeoutException):
                decoder.suspect.set()
                message = SILENT.format(self._shared.settings.decode_timeout_s)
            else:
                decoder.mark_down()
                message = LOST
            logger.warning("%s lost in decode at %s", self._request_id, decoder.name)
            pending = b"data: " + json.dumps(bad_gateway(message).body).encode() + b"\n\n"
        await _send_body(send, pending, more=False)
        self.outcome = outcome

    async def _send_whole(self, response: httpx.Response, send: Send) -> None:
        """The server's status and body, unchanged."""
        self.outcome = "ok" if response.status_code < 400 else "refused"
        length = (b"content-length", str(len(response.content)).encode())
        await self._start(response, send, length)
        await _send_body(send, response.content, more=False)

    async def _start(
        self, response: httpx.Response, send: Send, *more: tuple[bytes, bytes]
    ) -> None:
        if not self._failed:
            own_s = time.perf_counter() - self._arrived_s - self._waited_s
            self._shared.metrics.own_time.observe(own_s)
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": [*to_client(response.headers.raw, self._request_id), *more],
            }
        )

    async def _send_upstream(
        self, instance: Instance, body: bytes, request_id: str, more: dict[str, str]
    ) -> httpx.Response:
        """The headers of the answer; its body is still to be read."""
        settings = self._shared.settings
        silence_s = None if instance.role == "prefill" else settings.decode_timeout_s
        timeout = httpx.Timeout(silence_s, connect=settings.connect_timeout_s)
        own = {"X-Request-Id": request_id, **more}
        request = httpx.Request(
            "POST",
            instance.url(self._request.path),
            content=body,
            headers=[*self._headers, *((k.encode(), v.encode("latin-1")) for k, v in own.items())],
            extensions={"timeout": timeout.as_dict()},
        )
        return await self._shared.transport.handle_async_request(request)

    def _note_failure(self, instance: Instance) -> None:
        """Not again for this request; counted if another server can take it."""
        self._failed.add(instance)
        pool = self._shared.prefillers if instance.role == "prefill" else self._shared.decoders
        if pool.available(self._failed):
            self._shared.metrics.retries.labels(instance.role, instance.name).inc()

    def _note_transfer(self, prefiller: Instance, *, kept: bool) -> None:
        if not kept:
            self._shared.metrics.untransferred.labels(prefiller.name).inc()
            if prefiller.keeps_kv:
                logger.warning(
                    "%s answers without kv_transfer_params: decode computes prompts again",
                    prefiller.name,
                )
        prefiller.keeps_kv = kept


class _BusyError(Exception):
    """A decode server answered 503."""


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
