"""The ``isochunk`` command."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from isochunk import __version__
from isochunk.calibrate.command import calibrate
from isochunk.plan_cli import plan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Dynamic Chunked Pipeline Parallel for stock vLLM.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"isochunk {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _need(module: str, extra: str) -> None:
    if find_spec(module) is None:
        typer.echo(f'error: this command needs {module}: pip install "isochunk[{extra}]"', err=True)
        raise typer.Exit(2)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(context: typer.Context) -> None:
    """Serve a model: `vllm serve` plus --enable-dynamic-chunking (see --help)."""
    _need("vllm", "vllm")
    # prometheus_client reads this when it is first imported: set it before vLLM is.
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="isochunk-metrics-")
    from isochunk.vllm.serve import serve as serve_vllm  # noqa: PLC0415  (heavy, optional)

    serve_vllm(context.args)


app.command()(plan)
app.command()(calibrate)
if find_spec("vllm") is not None and find_spec("plotly") is not None:
    from isochunk.benchmark.command import bench

    app.command()(bench)
if all(map(find_spec, ("httpx", "starlette", "uvicorn", "prometheus_client"))):
    from isochunk.pd.router.command import router

    app.command(
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(router)
if all(find_spec(module) is not None for module in ("yaml", "httpx", "psutil")):
    from isochunk.pd.up import up

    app.command()(up)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for models, logs and the page.")] = Path(
        "demo-out"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds per model.")] = 2,
) -> None:
    """Serve two small models with two pipeline stages on the CPU and compare the TTFT."""
    _need("vllm", "cpu")
    _need("plotly", "demo")
    from isochunk.demo.run import run_demo  # noqa: PLC0415  (heavy, optional)

    sys.exit(run_demo(out, rounds))


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
