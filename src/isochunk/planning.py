"""Predictions and advice from stage models: what `isochunk plan` shows.

TTFT and throughput come from the simulator, so they hold as far as the stage models do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isochunk.chunk_plan import FIXED_SIZES
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.policies import ChunkPolicy, EqualLatency, FixedChunk
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.stages import slowest_stage
from isochunk.timeline import Timeline
from isochunk.workload import ClosedLoop, Request, Workload, poisson

REQUESTS_PER_CLIENT = 4
POISSON_REQUESTS = 200
# A smaller budget that costs no more than this is recommended: it saves activation memory.
BUDGET_TOLERANCE = 0.01
# A fixed size is recommended if auto's mean TTFT is longer by more than this: it needs no model.
FIXED_TOLERANCE = 0.02
DEFAULT_MIN_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with the token budget that it runs at."""

    name: str
    max_num_batched_tokens: int
    policy: ChunkPolicy


class Load(NamedTuple):
    """Requests to predict for, and what to call them."""

    title: str
    workload: Workload


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a policy is predicted to do with a load."""

    name: str
    max_num_batched_tokens: int
    load: Load
    ttft_ms: float
    """Mean over the requests."""
    p99_ttft_ms: float
    prompt_tokens_per_s: float
    num_steps: int


def closed_loops(
    num_prompts: Sequence[int], concurrencies: Sequence[int], num_output: int = 1
) -> list[Load]:
    """Equal prompts, so many at a time; one request only at concurrency 1."""
    return [
        Load(
            f"{num_prompt} tokens, concurrency {concurrency}",
            ClosedLoop(
                [Request(num_prompt, 0, num_output)]
                * (1 if concurrency == 1 else REQUESTS_PER_CLIENT * concurrency),
                concurrency,
            ),
        )
        for num_prompt in num_prompts
        for concurrency in concurrencies
    ]


def poisson_loads(
    num_prompts: Sequence[int], rates_per_s: Sequence[float], num_output: int = 1
) -> list[Load]:
    """Prompts of these lengths, each as likely, that come at random moments."""
    rng = random.Random(0)
    requests = [Request(rng.choice(num_prompts), 0, num_output) for _ in range(POISSON_REQUESTS)]
    lengths = "/".join(map(str, num_prompts))
    mean = sum(request.num_prompt for request in requests) / len(requests)
    return [
        Load(
            f"{POISSON_REQUESTS} requests of {lengths} tokens, {rate:g} requests/s: "
            f"{rate * mean:.0f} tok/s come in",
            poisson(requests, rate, seed=0),
        )
        for rate in rates_per_s
    ]


def candidates(
    pipeline: Pipeline, budget: int, alignment: int, min_chunk: int = DEFAULT_MIN_CHUNK
) -> list[Candidate]:
    """Fixed sizes up to the budget, equal latency where it can shrink, and auto."""
    sizes = sorted({size for size in FIXED_SIZES if size < budget} | {budget})
    found = [Candidate(f"fixed {size}", size, FixedChunk()) for size in sizes]
    if min_chunk < budget:
        equal = EqualLatency(
            pipeline.stages[slowest_stage(pipeline.stages, budget, budget)],
            budget,
            smooth_factor=0.75,
            min_chunk=min_chunk,
            alignment=alignment,
        )
        found.append(Candidate("equal-latency", budget, equal))
    found.append(_auto(pipeline, budget, alignment))
    return found


def _auto(pipeline: Pipeline, budget: int, alignment: int) -> Candidate:
    return Candidate("auto", budget, ShortestTTFT(pipeline, budget, alignment))


def run_candidate(pipeline: Pipeline, candidate: Candidate, load: Load) -> Timeline:
    """Simulate a policy under a load."""
    return simulate(pipeline, candidate.policy, load.workload, candidate.max_num_batched_tokens)


def predict(
    pipeline: Pipeline, loads: Sequence[Load], budget: int, alignment: int
) -> Iterator[Prediction]:
    """Predictions one by one (a long sweep may show progress): by load, by policy."""
    for load in loads:
        for candidate in candidates(pipeline, budget, alignment):
            timeline = run_candidate(pipeline, candidate, load)
            yield Prediction(
                candidate.name,
                candidate.max_num_batched_tokens,
                load,
                timeline.mean_ttft_ms,
                timeline.ttft_percentile_ms(99),
                timeline.prompt_tokens_per_s,
                len(timeline.batches),
            )


def recommend_budget(
    pipeline: Pipeline, predictions: Sequence[Prediction], max_budget: int, alignment: int
) -> int:
    """The smallest ``max_num_batched_tokens`` that costs ``auto`` at most 1 % of its mean TTFT.

    On every load of ``predictions``, which are for ``max_budget``. A smaller budget saves
    activation memory; under load, steps may need a larger one than a prompt alone.
    """
    autos = [row for row in predictions if row.name == "auto"]
    sizes: list[int] = sorted(size for size in FIXED_SIZES if size < max_budget)
    for size in sizes:
        if all(
            run_candidate(pipeline, _auto(pipeline, size, alignment), row.load).mean_ttft_ms
            <= (1 + BUDGET_TOLERANCE) * row.ttft_ms
            for row in autos
        ):
            return size
    return max_budget


@dataclass(frozen=True, slots=True)
class BetterFixed:
    """A fixed size that serves the loads better than auto."""

    max_num_batched_tokens: int
    auto_ratio: float
    """auto's mean TTFT by that of this size, the geometric mean over the loads."""


def better_fixed(predictions: Sequence[Prediction]) -> BetterFixed | None:
    """The best of the fixed sizes over all loads, where auto is slower by more than 2 %."""
    by_name: dict[str, list[Prediction]] = {}
    for row in predictions:
        by_name.setdefault(row.name, []).append(row)
    best = None
    for name, rows in by_name.items():
        if not name.startswith("fixed"):
            continue
        logs = [
            math.log(auto.ttft_ms / row.ttft_ms)
            for auto, row in zip(by_name["auto"], rows, strict=True)
        ]
        ratio = math.exp(sum(logs) / len(logs))
        if ratio > 1 + FIXED_TOLERANCE and (best is None or ratio > best.auto_ratio):
            best = BetterFixed(rows[0].max_num_batched_tokens, ratio)
    return best


@dataclass(frozen=True, slots=True)
class PartitionAdvice:
    """Layers by stage that even out the stages, and the slowest stage's time before and after."""

    layers: tuple[int, ...]
    slowest_ms: float
    advised: tuple[int, ...]
    advised_slowest_ms: float

    @property
    def is_better(self) -> bool:
        """Whether the advised partition is faster by more than 1 %."""
        return self.advised_slowest_ms < 0.99 * self.slowest_ms


def advise_partition(
    stages: Sequence[LatencyModel], layers: Sequence[int], num_cached: int, num_new: int
) -> PartitionAdvice:
    """Move layers between stages so that the slowest one gets faster.

    One partition can't tell a stage's layers from what else it does (embedding, lm_head), so a
    layer is taken to cost what it costs on the stage that is cheapest per layer, and the rest
    of a stage's time stays with that stage. Ties give a later stage the extra layer: a chunk
    then reaches the last stage sooner (61 layers on 4 equal stages: 15,15,15,16).

    Args:
        stages: models by stage.
        layers: current layers by stage.
        num_cached: prefix [tokens] of the chunk that is evened out.
        num_new: its size [tokens].
    """
    if len(layers) != len(stages) or min(layers) < 1:
        raise ValueError(
            f"layers={tuple(layers)} must be >= 1 each and {len(stages)} in number, one a stage"
        )
    times = [model.predict_ms(num_cached, num_new) for model in stages]
    layer_ms = min(time / count for time, count in zip(times, layers, strict=True))
    extras = [time - count * layer_ms for time, count in zip(times, layers, strict=True)]
    advised = [1] * len(stages)
    for _ in range(sum(layers) - len(stages)):
        after = [
            (extra + (count + 1) * layer_ms, -stage)
            for stage, (extra, count) in enumerate(zip(extras, advised, strict=True))
        ]
        # Rounding must not decide between equal stages.
        advised[-min((round(time, 9), stage) for time, stage in after)[1]] += 1
    slowest = max(e + n * layer_ms for e, n in zip(extras, advised, strict=True))
    return PartitionAdvice(tuple(layers), max(times), tuple(advised), slowest)
