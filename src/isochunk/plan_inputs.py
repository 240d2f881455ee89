"""What ``isochunk plan`` starts from: stage models from a profile, samples or rough numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isochunk.fitting import FitReport
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.profile import load_profile
from isochunk.samples import fit_samples

DEFAULT_BUDGET = 32768
DEFAULT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Source:
    """A pipeline and what is known about where it comes from."""

    pipeline: Pipeline
    budget: int = DEFAULT_BUDGET
    alignment: int = DEFAULT_ALIGNMENT
    layers: tuple[int, ...] | None = None
    reports: tuple[FitReport, ...] = ()


def from_profile(path: Path) -> Source:
    """A saved profile.

    Raises:
        ProfileError: it can't be read or isn't one.
    """
    profile = load_profile(path)
    return Source(
        profile.to_pipeline(), profile.max_num_batched_tokens, profile.alignment, profile.layers
    )


def from_samples(path: Path, transfer_ms: float) -> Source:
    """Timed chunks.

    Raises:
        SamplesError: they can't be read or don't give a model.
    """
    reports = tuple(fit_samples(path))
    models = tuple(report.model for report in reports if report.model is not None)
    return Source(Pipeline(models, transfer_ms), reports=reports)


def from_rough_numbers(
    stage_ms_per_1k: Sequence[float],
    *,
    pp: int | None,
    attention_share: float,
    fixed_ms: float,
    prefix_share: float,
    transfer_ms: float,
    longest: int,
) -> Source:
    """Stage models from rough numbers; attention takes its share of the longest prompt.

    Raises:
        ValueError: not one number for all stages or one for each; or a number isn't above 0.
    """
    for value in stage_ms_per_1k:
        if not 0 < value < math.inf:
            raise ValueError(f"--stage-ms-per-1k={value} must be a number of ms above 0")
    num_stages = pp or max(len(stage_ms_per_1k), 2)
    if len(stage_ms_per_1k) == 1:
        stage_ms_per_1k = [*stage_ms_per_1k] * num_stages
    if len(stage_ms_per_1k) != num_stages:
        raise ValueError(
            f"--stage-ms-per-1k was given {len(stage_ms_per_1k)} times; expected once, or once "
            f"for each of the {num_stages} stages"
        )
    models = []
    for value in stage_ms_per_1k:
        token_ms = value / 1024
        attention_ms = attention_share / (1 - attention_share) * token_ms / longest
        models.append(LatencyModel(fixed_ms, prefix_share * token_ms, token_ms, attention_ms))
    return Source(Pipeline(tuple(models), transfer_ms))


def parse_layers(text: str, num_stages: int) -> tuple[int, ...]:
    """Layers by stage.

    Raises:
        ValueError: it isn't a list of numbers >= 1, one a stage.
    """
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layers={text!r} is not a list such as 15,15,15,16") from None
    if len(layers) != num_stages or min(layers) < 1:
        raise ValueError(f"--layers={text!r} must be {num_stages} numbers >= 1, one a stage")
    return layers
