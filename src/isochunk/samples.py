"""Timed chunks from a CSV file, and stage models fitted to them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from isochunk.fitting import ChunkSample, FitReport, fit_latency_model

SAMPLE_FIELDS = ("stage", "num_cached", "num_new", "latency_ms")


class SamplesError(ValueError):
    """A samples file is wrong; the message names file, line and field."""


def read_samples(path: Path) -> list[list[ChunkSample]]:
    """Samples by stage from a CSV file with the columns stage, num_cached, num_new, latency_ms.

    Raises:
        SamplesError: the file can't be read, a column is missing, a value isn't a number in its
            range, or the stages aren't numbered 0, 1, 2, ….
    """
    by_stage: dict[int, list[ChunkSample]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in SAMPLE_FIELDS if name not in (reader.fieldnames or ())]
            if missing:
                raise SamplesError(
                    f"{path}: column {', '.join(missing)} is missing; "
                    f"expected {','.join(SAMPLE_FIELDS)}"
                )
            for row in reader:
                place = f"{path}:{reader.line_num}"
                stage, cached = (_number(place, name, row[name], 0) for name in SAMPLE_FIELDS[:2])
                new = _number(place, "num_new", row["num_new"], 1)
                latency_ms = _number(place, "latency_ms", row["latency_ms"], 0)
                sample = ChunkSample(int(cached), int(new), latency_ms)
                by_stage.setdefault(int(stage), []).append(sample)
    except (OSError, UnicodeDecodeError) as error:
        raise SamplesError(f"{path}: can't be read: {error}") from error
    if sorted(by_stage) != list(range(len(by_stage))) or not by_stage:
        raise SamplesError(
            f"{path}: stage={sorted(by_stage)} must be numbered 0, 1, 2, … without a gap"
        )
    return [by_stage[stage] for stage in range(len(by_stage))]


def fit_samples(path: Path) -> list[FitReport]:
    """Fit reports by stage.

    Raises:
        SamplesError: as :func:`read_samples`, or a stage's fit is refused.
    """
    reports = [fit_latency_model(samples) for samples in read_samples(path)]
    refused = [f"stage {i}: {report}" for i, report in enumerate(reports) if not report.accepted]
    if refused:
        raise SamplesError(f"{path}: no usable fit: {'; '.join(refused)}")
    return reports


def _number(place: str, name: str, text: str | None, least: int) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise SamplesError(f"{place}: {name}={text!r} is not a number >= {least}")
    return value
