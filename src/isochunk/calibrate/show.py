"""What ``isochunk calibrate`` does and prints, on a terminal or as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.console import Console

from isochunk.calibrate.run import CalibrateError, Outcome, Result, calibrate_server
from isochunk.calibrate.state import ServerState
from isochunk.client import Answer, ApiError, Client
from isochunk.latency import LETTERS
from isochunk.profile import ProfileError, save_profile
from isochunk.progress_bar import counting_progress


def run_calibrate(
    *,
    base_url: str,
    prompt_tokens: int | None,
    num_requests: int,
    model: str,
    api_key: str | None,
    timeout_s: float,
    as_json: bool,
    save: Path | None,
) -> int:
    """See ``isochunk calibrate``; returns its exit status."""
    console = Console(stderr=as_json)
    try:
        client = Client(_server_url(base_url), model, api_key=api_key, timeout_s=timeout_s)
        result = _run(client, prompt_tokens, num_requests, console)
        is_installed = result.outcome.is_installed
        if save is not None and is_installed:
            save_profile(result.to_profile(client.vllm_version()), save)
    except (CalibrateError, ApiError, ProfileError) as error:
        typer.echo(f"isochunk calibrate: {error}", err=True)
        return 2
    if as_json:
        typer.echo(json.dumps(to_json(result), indent=2))
    else:
        for line in describe(result):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if save is not None and is_installed:
        typer.echo(f"Wrote {save}", err=as_json)
    if not is_installed:
        typer.echo(f"isochunk calibrate: {result.outcome}: {result.state.reason}", err=True)
    return 0 if is_installed else 1


def _run(client: Client, prompt_tokens: int | None, num_requests: int, console: Console) -> Result:
    with counting_progress(console, is_transient=True) as progress:
        task = progress.add_task("asking the server", total=num_requests)

        def start(num_tokens: int) -> None:
            progress.update(task, description=f"prompts of {num_tokens} tokens")

        def show(answer: Answer, state: ServerState) -> None:
            progress.advance(task)
            progress.console.print(
                f"request {progress.tasks[0].completed:.0f}: {answer.num_prompt_tokens} tokens, "
                f"TTFT {answer.ttft_s:.2f} s, {state.phase}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

        return calibrate_server(client, prompt_tokens, num_requests, start, show)


def describe(result: Result) -> list[str]:
    """Lines for people: the outcome, and each stage's model with its checks."""
    state = result.state
    heads = {
        Outcome.INSTALLED: f"Latency model installed after {_requests(result)}",
        Outcome.ALREADY_INSTALLED: "The server has its latency model already; nothing was sent",
        Outcome.GIVEN_UP: "The calibration was given up, chunks stay fixed",
        Outcome.NOT_INSTALLED: f"No latency model after {_requests(result)}",
    }
    lines = [f"{heads[result.outcome]} (policy {state.engine.get('policy', '-')})."]
    for stage, fit in enumerate(state.fits):
        lines.append(f"stage {stage}: {fit}")
        if fit.model is not None:
            errors = (f"{k} ± {fit.standard_errors[k]:.2g}" for k in LETTERS.values())
            lines.append(f"  standard errors: {', '.join(errors)}")
    if state.models:
        lines.append(
            f"step overhead: {state.overhead.fixed_ms:.4g} + {state.overhead.token_ms:.4g}·x ms"
        )
    return lines


def _requests(result: Result) -> str:
    count = len(result.answers)
    return f"{count} request{'' if count == 1 else 's'}"


def to_json(result: Result) -> dict[str, Any]:
    """For programs: coefficients in ms and tokens, errors as fractions, TTFT in seconds."""
    return {
        "outcome": result.outcome.replace(" ", "_"),
        "model": result.model,
        "phase": result.state.phase,
        "reason": result.state.reason or None,
        "requests": [
            {"prompt_tokens": a.num_prompt_tokens, "ttft_s": round(a.ttft_s, 4)}
            for a in result.answers
        ],
        "stages": [
            {
                "coefficients": fit.model
                and {LETTERS[name]: value for name, value in asdict(fit.model).items()},
                "standard_errors": fit.standard_errors,
                "checks": {k: v if math.isfinite(v) else None for k, v in fit.checks.items()},
            }
            for fit in result.state.fits
        ],
        "step_overhead": {
            "c": result.state.overhead.fixed_ms,
            "b": result.state.overhead.token_ms,
        },
        "engine": result.state.engine,
    }


def _server_url(text: str) -> str:
    """The URL without a trailing /v1, which OpenAI clients are given."""
    try:
        url = httpx.URL(text.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise CalibrateError(f"--base-url={text!r} is not a URL such as http://127.0.0.1:8000")
    return str(url)
