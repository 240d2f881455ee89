"""The shortest TTFT that any chunks could have: ``python -m bench.attainable PROFILE...``.

For profiles that ``isochunk bench`` saved for a pipeline of two stages: simulated TTFT of one
prompt in fixed chunks and under ``ShortestTTFT``, and the least over all chunk sequences: what a
policy could reach on that machine if the models were exact.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from bench.peers import ALIGNMENT
from bench.simulate_single import ttft_ms
from isochunk.benchmark.command import DEFAULT_FIXED
from isochunk.makespan import FloatArray, IntArray, Pipeline, stage_times_ms
from isochunk.policies import FixedChunk
from isochunk.profile import load_profile
from isochunk.shortest_ttft import ShortestTTFT

STEP_MS = 0.02


def least_ms(pipeline: Pipeline, num_tokens: int, budget: int) -> float:
    """Lower bound of the makespan [ms] on two stages, over all chunk ends at multiples of 64.

    Dynamic programming over chunk ends. A state is when each stage is done with the tokens so
    far; what is later on both stages is dropped, and of states that agree on stage 0 to
    ``STEP_MS`` one remains, with the earlier of each time. Batches in flight aren't limited and
    transfers take no time, which can only lower the result.
    """
    ends: IntArray = np.append(np.arange(0, num_tokens, ALIGNMENT), num_tokens)
    states: list[FloatArray] = [np.zeros((1, 2))]
    for index in range(1, len(ends)):
        first = int(np.searchsorted(ends, ends[index] - budget))
        starts = ends[first:index]
        times = stage_times_ms(pipeline, starts, np.full_like(starts, ends[index]))
        found = []
        for before, (time_0, time_1) in zip(states[first:], times, strict=True):
            done_0 = before[:, 0] + time_0
            found.append(np.stack([done_0, np.maximum(done_0, before[:, 1]) + time_1], axis=1))
        states.append(_earliest(np.concatenate(found)))
    return float(states[-1][:, 1].min())


def _earliest(states: FloatArray) -> FloatArray:
    """What no other state is earlier than on both stages."""
    states[:, 0] = np.floor(states[:, 0] / STEP_MS) * STEP_MS
    states = states[np.lexsort((states[:, 1], states[:, 0]))]
    before = np.minimum.accumulate(np.concatenate([[np.inf], states[:-1, 1]]))
    return states[states[:, 1] < before]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("profile", type=Path, nargs="+")
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    args = parser.parse_args()
    num_tokens = args.prompt_tokens
    table = Table(
        "profile",
        "best fixed",
        "auto",
        "least",
        "auto / best",
        "least / best",
        "auto / 2048",
        "least / 2048",
        box=MARKDOWN,
    )
    print(f"TTFT of {num_tokens} tokens by the fitted models")
    for path in args.profile:
        profile = load_profile(path)
        pipeline, budget = profile.to_pipeline(), profile.max_num_batched_tokens
        if pipeline.num_stages != 2:
            parser.error(f"{path}: {pipeline.num_stages} stages; expected 2")
        fixed = {
            size: ttft_ms(pipeline, FixedChunk(size), num_tokens, budget) for size in DEFAULT_FIXED
        }
        best = min(fixed, key=lambda size: fixed[size])
        policy = ShortestTTFT(pipeline, budget, profile.alignment)
        times = (
            ttft_ms(pipeline, policy, num_tokens, budget),
            least_ms(pipeline, num_tokens, budget),
        )
        table.add_row(
            path.stem,
            f"{fixed[best]:.0f} ms ({best})",
            *(f"{time_ms:.0f} ms" for time_ms in times),
            *(f"{time_ms / fixed[size]:.3f}" for size in (best, 2048) for time_ms in times),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
