"""What a calibration runs: sizes of the startup sweep, probe sizes and their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_SWEEP_SIZES = 24
SWEEP_REPEATS = 2
"""Timed forwards per sweep size (the best counts), after one warm-up forward in all."""
PROBE_DIVISORS = (4,)
"""Probe sizes besides the budget are the budget divided by these (ATOM's guide: a quarter)."""
# Order of the probe sizes (0 = the largest) in successive requests, by their number: the
# sizes meet different prefixes in each, so that requests of one length give many shapes.
PROBE_PATTERNS = {
    2: ((0, 1), (1, 0), (0, 0, 1, 1), (1, 1, 0, 0)),
    3: ((0, 1, 2), (1, 2, 0), (2, 1, 0), (2, 0, 1)),
}


def plan_sweep(max_tokens: int, alignment: int) -> tuple[int, ...]:
    """Up to 24 unique, increasing forward sizes [tokens] that end at ``max_tokens``.

    Multiples of ``alignment`` (the largest one aside), so that runtime shapes are covered.
    """
    if max_tokens < 1:
        return ()
    steps = np.linspace(0, max_tokens, MAX_SWEEP_SIZES + 1)[1:]
    sizes = {max(int(s) - int(s) % alignment, min(alignment, max_tokens)) for s in steps[:-1]}
    return (*sorted(s for s in sizes if s < max_tokens), max_tokens)


def plan_probes(
    budget: int, min_chunk: int, alignment: int, divisors: Sequence[int] = PROBE_DIVISORS
) -> tuple[int, ...]:
    """Chunk sizes [tokens] to alternate, largest first; empty if there are no two of them."""
    large = budget - budget % alignment
    sizes = {large} if large > 0 else set()
    for divisor in divisors:
        small = max(budget // divisor, min_chunk)
        small += -small % alignment
        if 0 < small < large:
            sizes.add(small)
    return tuple(sorted(sizes, reverse=True)) if len(sizes) > 1 else ()


def longest_too_short(budget: int, *, needs_shrink: bool) -> int:
    """The longest prompt [tokens] that a calibration learns nothing from.

    One chunk tells nothing about a, unless the policy may split what would fit into one.
    """
    return budget if needs_shrink else budget // 2
