"""The command-line flags of dynamic chunking (ATOM's spelling) and what they become."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from isochunk.config import OWN_KEY, DynamicChunkingConfig, resolve_config

_PREFIX = "dynamic_chunking_"
# Settings with a flag of their name, and the flag's metavar. None: "not given".
_VALUES = {
    "policy": "NAME",
    "smooth_factor": "F",
    "min_chunk_size": "TOKENS",
    "max_calibration_samples": "N",
    "max_fit_error": "F",
    "trace_file": "PATH",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag group to a parser. Values are checked by ``resolve_flags``."""
    group = parser.add_argument_group(
        "DynamicChunking", "isochunk: prefill chunks sized so that the pipeline stays full"
    )
    group.add_argument(
        "--enable-dynamic-chunking", action="store_true", help="Size prefill chunks dynamically."
    )
    fields = DynamicChunkingConfig.model_fields
    for setting, metavar in _VALUES.items():
        group.add_argument(
            spell_flag(setting),
            dest=_PREFIX + setting,
            metavar=metavar,
            default=None,
            help=f"{fields[setting].description} (default: {fields[setting].default})",
        )
    group.add_argument(
        spell_flag("allow_request_override"),
        action="store_true",
        default=None,
        help="Let requests ask for fixed chunks with vllm_xargs (for comparisons).",
    )


def spell_flag(setting: str) -> str:
    """The flag of a setting: ``smooth_factor`` -> ``--dynamic-chunking-smooth-factor``."""
    return f"--{_PREFIX}{setting}".replace("_", "-")


def resolve_flags(
    args: argparse.Namespace, additional_config: Mapping[str, Any] | None, env: Mapping[str, str]
) -> tuple[DynamicChunkingConfig, dict[str, Any]]:
    """Settings in force, and the ``additional_config`` that carries them to the engine.

    Raises:
        ConfigError: dynamic chunking is on and a setting is unknown or out of range.
    """
    additional = dict(additional_config or {})
    given = {
        setting: value
        for setting in (*_VALUES, "allow_request_override")
        if (value := getattr(args, _PREFIX + setting)) is not None
    }
    names = {setting: spell_flag(setting) for setting in given}
    if args.enable_dynamic_chunking:
        given["enabled"] = True
    own = additional.get(OWN_KEY, {})
    if given and isinstance(own, Mapping):
        additional[OWN_KEY] = {**own, **given}
    settings = resolve_config(additional, env, names)
    if settings.enabled:  # as validated: the engine process needs no environment for it
        additional[OWN_KEY] = settings.model_dump()
    return settings, additional
