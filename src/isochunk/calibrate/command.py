"""The ``isochunk calibrate`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    *,
    base_url: Annotated[str, typer.Option(help="Of the server, e.g. http://127.0.0.1:8000.")],
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each prompt; by default 131072, or what fits.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts at most, one at a time.")] = 5,
    model: Annotated[str, typer.Option(help="Served name; by default the first one.")] = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="The server's API key.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for an answer.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write a profile for `isochunk plan --profile`.")
    ] = None,
) -> None:
    """Send random prompts to an idle server until it has its latency model, and print that.

    Exit status 0: the model is installed.
    1: the calibration was given up, or needs more requests.
    2: the server can't be calibrated, or an option is wrong.
    """
    # Here: it imports prometheus_client, which `serve` must not before it has set a variable.
    from isochunk.calibrate.show import run_calibrate  # noqa: PLC0415

    raise typer.Exit(
        run_calibrate(
            base_url=base_url,
            prompt_tokens=prompt_tokens,
            num_requests=requests,
            model=model,
            api_key=api_key,
            timeout_s=timeout,
            as_json=as_json,
            save=save,
        )
    )
