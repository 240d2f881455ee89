"""The ``isochunk router`` command."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import NoReturn, get_args

import typer
from pydantic import ValidationError

from isochunk.pd.router.settings import (
    MOONCAKE_BOOTSTRAP_PORT,
    Address,
    KVConnectorName,
    RouterSettings,
)

SECONDS = {
    "connect_timeout_s": "to connect to a server",
    "prefill_timeout_s": "for a prefill, its queueing included",
    "decode_timeout_s": "of silence of a decode server; a plain answer is silence until its end",
    "health_timeout_s": "without an answer to /health, then a server is down",
    "shutdown_timeout_s": "for requests in flight after SIGTERM",
}


def router(context: typer.Context) -> None:
    """Route requests to prefill and decode servers; vLLM-Ascend's proxy options (see --help)."""
    run(parse_settings(context.args))


def run(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # Here, because of prometheus_client: `isochunk serve` has to set its variable first.
    import uvicorn  # noqa: PLC0415

    from isochunk.pd.router.app import create_app  # noqa: PLC0415

    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(settings.shutdown_timeout_s),
    )


def parse_settings(arguments: Sequence[str]) -> RouterSettings:
    """Settings from the command line; a wrong one ends the process with status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    prefillers = _addresses(
        parser, "prefiller", given.prefiller_hosts, given.prefiller_ports, given.bootstrap_ports
    )
    decoders = _addresses(parser, "decoder", given.decoder_hosts, given.decoder_ports)
    values = {name: getattr(given, name) for name in SECONDS}
    try:
        return RouterSettings(
            prefillers=prefillers,
            decoders=decoders,
            kv_connector=given.kv_connector,
            host=given.host,
            port=given.port,
            **values,
        )
    except ValidationError as error:
        _fail(parser, error)


def _addresses(
    parser: argparse.ArgumentParser,
    role: str,
    hosts: list[str] | None,
    ports: list[int],
    bootstrap_ports: list[int] | None = None,
) -> list[Address]:
    hosts = hosts or ["127.0.0.1"] * len(ports)
    if len(hosts) != len(ports):
        parser.error(
            f"--{role}-hosts names {len(hosts)} hosts ({' '.join(hosts)}) but --{role}-ports "
            f"{len(ports)} ports ({' '.join(map(str, ports))}): give one port for each host"
        )
    bootstrap_ports = bootstrap_ports or [MOONCAKE_BOOTSTRAP_PORT] * len(ports)
    if len(bootstrap_ports) != len(ports):
        parser.error(
            f"--prefiller-bootstrap-ports names {len(bootstrap_ports)} ports "
            f"({' '.join(map(str, bootstrap_ports))}) for {len(ports)} prefillers: give one each"
        )
    return [
        Address(host=host, port=port, bootstrap_port=bootstrap_port)
        for host, port, bootstrap_port in zip(hosts, ports, bootstrap_ports, strict=True)
    ]


def _fail(parser: argparse.ArgumentParser, error: ValidationError) -> NoReturn:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["loc"]:
        option = "--" + str(first["loc"][0]).replace("_", "-")
        message = f"{option} {first['input']}: {message}"
    parser.error(message)


def _port(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"port {text} is not an integer in 1…65535")
    return int(text)


def _host(text: str) -> str:
    if not text or "/" in text:
        raise argparse.ArgumentTypeError(f"host {text!r} is not a host name or an IP address")
    return text


def _parser() -> argparse.ArgumentParser:
    defaults = {name: field.default for name, field in RouterSettings.model_fields.items()}
    parser = argparse.ArgumentParser(
        prog="isochunk router",
        description="Route OpenAI-style requests to prefill and decode servers.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", type=_host, default=defaults["host"], help="default: %(default)s")
    parser.add_argument("--port", type=_port, default=defaults["port"], help="default: %(default)s")
    for role in ("prefiller", "decoder"):
        parser.add_argument(
            f"--{role}-hosts",
            f"--{role}-host",
            type=_host,
            nargs="+",
            metavar="HOST",
            help="one for each port; default: 127.0.0.1",
        )
        parser.add_argument(
            f"--{role}-ports",
            f"--{role}-port",
            type=_port,
            nargs="+",
            metavar="PORT",
            required=True,
            help=f"of the {role}s' vLLM servers",
        )
    parser.add_argument(
        "--prefiller-bootstrap-ports",
        dest="bootstrap_ports",
        type=_port,
        nargs="+",
        metavar="PORT",
        help=f"VLLM_MOONCAKE_BOOTSTRAP_PORT of each prefiller; default: {MOONCAKE_BOOTSTRAP_PORT}",
    )
    parser.add_argument(
        "--kv-connector",
        choices=get_args(KVConnectorName),
        default=defaults["kv_connector"],
        help="what the servers transfer KV blocks with; default: %(default)s",
    )
    for name, meaning in SECONDS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=float,
            default=defaults[name],
            metavar="SECONDS",
            help=f"{meaning}; default: %(default)g",
        )
    return parser
