"""Timed chunks from a CSV file, and stage models fitted to them."""

from __future__ import annotations

from pathlib import Path

from isochunk.csv_table import Column, read_table
from isochunk.fitting import ChunkSample, FitReport, fit_latency_model

MAX_LATENCY_MS = 1e8
"""28 hours. More is a mistake."""
COLUMNS = (
    Column("stage"),
    Column("num_cached"),
    Column("num_new", least=1),
    Column("latency_ms", is_whole=False, most=MAX_LATENCY_MS),
)


class SamplesError(ValueError):
    """A samples file is wrong; the message names file, line and field."""


def read_samples(path: Path) -> list[list[ChunkSample]]:
    """Samples by stage from a CSV file with the columns stage, num_cached, num_new, latency_ms.

    Raises:
        SamplesError: the file can't be read, a column is missing, a value isn't a number in its
            range, or the stages aren't numbered 0, 1, 2, ….
    """
    by_stage: dict[int, list[ChunkSample]] = {}
    for row in read_table(path, COLUMNS, SamplesError):
        stage, cached, new, latency_ms = row.values
        sample = ChunkSample(int(cached), int(new), latency_ms)
        by_stage.setdefault(int(stage), []).append(sample)
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
