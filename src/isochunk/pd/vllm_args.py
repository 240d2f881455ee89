"""Extra arguments of ``vllm serve``: as a topology file gives them, and as a command line.

A mapping of flags to values (``true`` gives ``--flag``, ``false`` ``--no-flag``, ``null`` takes a
common one back, a list several values, a mapping JSON), or a list that goes through as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Args = dict[str, Any] | list[str]

VALID = (
    "a mapping such as {max-model-len: 8192, enforce-eager: true} or a list such as "
    '["--max-model-len", "8192"]'
)


def check_args(value: object) -> Args:
    """A value of ``args`` in the file, lists as text.

    Raises:
        ValueError: neither a mapping nor a list of scalars.
    """
    if isinstance(value, dict) and all(key.strip("-_") for key in value):
        return value
    if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        return [_text(v) for v in value]
    raise ValueError(VALID)


def flag_name(key: str) -> str:
    """``max_model_len`` and ``--max-model-len`` -> ``--max-model-len``; short flags stay."""
    if key.startswith("-") and not key.startswith("--"):
        return key
    return "--" + key.lstrip("-").replace("_", "-")


def iterate_flags(args: Args) -> Iterator[tuple[str | int, str, Any]]:
    """Each flag: its key or position in the file, its name, and its value."""
    if isinstance(args, dict):
        for key, value in args.items():
            yield key, flag_name(key), value
        return
    for i, token in enumerate(args):
        if token.startswith("-") and token.lstrip("-")[:1].isalpha():
            name, _, value = token.partition("=")
            following = args[i + 1] if i + 1 < len(args) else ""
            yield i, flag_name(name), value or ("" if following.startswith("-") else following)


def merge_args(common: Args, own: Args) -> list[str]:
    """The command line of both; where both are mappings, ``own`` replaces a flag of ``common``."""
    if isinstance(common, dict) and isinstance(own, dict):
        merged = {flag_name(k): v for k, v in common.items()}
        return _argv(merged | {flag_name(k): v for k, v in own.items()})
    return _argv(common) + _argv(own)


def _argv(args: Args) -> list[str]:
    if not isinstance(args, dict):
        return args
    argv: list[str] = []
    for key, value in args.items():
        flag = flag_name(key)
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag.lstrip('-')}")
        elif isinstance(value, list) and not any(isinstance(v, dict | list) for v in value):
            argv += [flag, *(_text(v) for v in value)]
        elif (text := _text(value)).startswith("-"):
            argv.append(f"{flag}={text}")  # argparse would take it for a flag
        else:
            argv += [flag, text]
    return argv


def _text(value: object) -> str:
    if isinstance(value, bool | dict | list | None):
        return json.dumps(value)
    return str(value)
