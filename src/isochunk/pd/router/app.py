"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from isochunk.pd.router.connectors import make_connector
from isochunk.pd.router.errors import RouterError, unavailable
from isochunk.pd.router.forward import Forwarding, Shared
from isochunk.pd.router.headers import to_client, to_server
from isochunk.pd.router.instances import Pool
from isochunk.pd.router.metrics import RouterMetrics
from isochunk.pd.router.monitor import Monitor
from isochunk.pd.router.prediction import TokenEstimate
from isochunk.pd.router.request import parse
from isochunk.pd.router.settings import RouterSettings

logger = logging.getLogger(__name__)

# vLLM closes idle connections after 5 s: let go of them first, or a request may meet one
# that is just being closed.
KEEP_ALIVE_S = 2.0
# A host that vanished without a word is noticed after 5 + 2·2 s.
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


def create_app(settings: RouterSettings) -> Starlette:
    """The router for ``settings``; its lifespan probes the servers before it serves."""
    router = Router(settings)
    return Starlette(
        routes=[
            Route("/v1/completions", router.generate, methods=["POST"]),
            Route("/v1/chat/completions", router.generate, methods=["POST"]),
            Route("/v1/models", router.models),
            Route("/health", router.health),
            Route("/metrics", router.metrics),
        ],
        lifespan=router.lifespan,
        exception_handlers={500: _internal_error},
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    return RouterError(
        500, "The router failed on this request.", "InternalServerError", outcome="error"
    ).response()


class Router:
    """The endpoints and what they share."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        # Certificates (slow to load) are not needed for plain HTTP.
        transport = httpx.AsyncHTTPTransport(
            verify=False,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
            socket_options=SOCKET_OPTIONS,
        )
        # Proxies of the environment are for the outside world.
        self.client = httpx.AsyncClient(transport=transport, trust_env=False)
        connector = make_connector(settings.kv_connector, self.client)
        self.prefillers = Pool("prefill", settings.prefillers)
        self.decoders = Pool("decode", settings.decoders)
        self.instances = [*self.prefillers.instances, *self.decoders.instances]
        self.shared = Shared(
            settings=settings,
            transport=transport,
            connector=connector,
            prefillers=self.prefillers,
            decoders=self.decoders,
            estimate=TokenEstimate(),
            metrics=RouterMetrics(self.instances),
        )
        self.monitor = Monitor(self.client, connector, settings)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Probe every server once, then watch them until the end."""
        await asyncio.gather(*map(self.monitor.probe, self.instances))
        watches = [asyncio.create_task(self.monitor.watch_health(i)) for i in self.instances]
        watches += [
            asyncio.create_task(self.monitor.watch_model(i)) for i in self.prefillers.instances
        ]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self.client.aclose()

    async def generate(self, request: Request) -> Response:
        """Completions and chat completions."""
        try:
            content = await request.body()
        except ClientDisconnect:
            self.shared.metrics.requests.labels("client_closed").inc()
            return Response(status_code=400)
        try:
            checked = parse(request.url.path, content)
        except RouterError as error:
            self.shared.metrics.requests.labels(error.outcome).inc()
            return error.response()
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        headers = to_server(request.headers.raw)
        return _Relay(self.shared, Forwarding(self.shared, checked, headers, request_id))

    async def models(self, request: Request) -> Response:
        """The model list of a server that is up, a decode server if possible."""
        for instance in reversed(self.instances):
            if not instance.up:
                continue
            try:
                answer = await self.client.get(
                    f"{instance.address.url}/v1/models",
                    headers=to_server(request.headers.raw),
                    timeout=self.settings.health_timeout_s,
                )
            except httpx.HTTPError:
                instance.suspect.set()
                continue
            response = Response(answer.content, answer.status_code)
            response.raw_headers += to_client(answer.headers.raw)
            return response
        return unavailable("No server is available.").response()

    async def health(self, request: Request) -> Response:
        """200 while at least one server of each role is up."""
        pools = (self.prefillers, self.decoders)
        ok = all(len(pool.down()) < len(pool.instances) for pool in pools)
        body = {
            "status": "ok" if ok else "unavailable",
            "down": {pool.role: [i.name for i in pool.down()] for pool in pools},
        }
        return JSONResponse(body, 200 if ok else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self.shared.metrics.render(), media_type="text/plain; version=0.0.4")


class _Relay(Response):
    """Runs a forwarding for as long as the client stays."""

    def __init__(self, shared: Shared, forwarding: Forwarding) -> None:
        self._shared = shared
        self._forwarding = forwarding
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._shared.metrics.requests.labels(self._forwarding.outcome).inc()
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        forwarding = self._forwarding
        try:
            await forwarding.run(send)
        except RouterError as error:
            forwarding.outcome = error.outcome
            await error.response()(scope, receive, send)
        except Exception:
            forwarding.outcome = "error"
            raise


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
