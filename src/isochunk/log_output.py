"""Where isochunk's own log lines appear inside an engine."""

from __future__ import annotations

import logging


def log_like(engine_logger: str) -> None:
    """Show isochunk's lines, which go through the standard library, where the engine's appear."""
    ours, engine = logging.getLogger("isochunk"), logging.getLogger(engine_logger)
    ours.handlers, ours.propagate = engine.handlers, False
    ours.setLevel(engine.getEffectiveLevel())
