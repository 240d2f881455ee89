"""Where a server's calibration stands, read from its ``/metrics``."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from isochunk.latency import LatencyModel
from isochunk.metrics import OFF
from isochunk.overhead import StepOverhead

CALIBRATING = ("sweeping", "probing", "confirming")
INSTALLED, GIVEN_UP = "installed", "given_up"

HOW_TO_ENABLE = (
    "dynamic chunking isn't enabled: start it with `isochunk serve MODEL "
    "--pipeline-parallel-size N --enable-dynamic-chunking`"
)
HOW_TO_EXPORT = (
    "it has no isochunk metrics: either dynamic chunking isn't enabled, or "
    "PROMETHEUS_MULTIPROC_DIR wasn't set when the server was started, so that /metrics lacks "
    'what its engine process knows. Set it to an empty directory (PROMETHEUS_MULTIPROC_DIR="'
    '$(mktemp -d)" vllm serve …), or use isochunk serve, which does'
)


class StateError(ValueError):
    """A server's metrics don't tell; the message says why and what to do."""


@dataclass(frozen=True)
class StageFit:
    """The last fit of a stage: its diagnostics and, once installed, its model."""

    checks: dict[str, float] = field(default_factory=dict)
    """As in ``isochunk_fit``; errors are relative. NaN: not reached."""
    model: LatencyModel | None = None
    standard_errors: dict[str, float] = field(default_factory=dict)
    """By coefficient (c, gamma, b, a), in its unit."""

    def __str__(self) -> str:
        known = defaultdict(lambda: math.nan, self.checks)
        text = (
            f"{known['num_samples']:.0f} samples, {known['num_shapes']:.0f} shapes, "
            f"{known['num_outliers']:.0f} outliers; error median {known['median_error']:.1%}, "
            f"max {known['max_error']:.1%}; prediction ±{known['prediction_error']:.1%}; "
            f"condition number {known['condition_number']:.3g}"
        )
        return f"{self.model} [{text}]" if self.model else text


@dataclass(frozen=True)
class ServerState:
    """What a server's metrics say about its calibration."""

    phase: str
    """"sweeping", "probing", "confirming", "installed", "given_up" or "off"."""
    reason: str
    """Why chunks stay fixed, if they do."""
    fits: tuple[StageFit, ...]
    """By stage; empty before the first fit."""
    overhead: StepOverhead
    engine: dict[str, str]
    """Labels of ``isochunk_engine_info``."""

    @property
    def is_final(self) -> bool:
        """Whether more prompts would change nothing."""
        return self.phase not in CALIBRATING

    @property
    def models(self) -> tuple[LatencyModel, ...]:
        """Installed models by stage; empty before."""
        return tuple(fit.model for fit in self.fits if fit.model is not None)


def read_state(metrics: str) -> ServerState:
    """Read the text of ``/metrics``.

    Raises:
        StateError: it isn't in Prometheus' format, or has no state of a calibration.
    """
    series: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                series[sample.name].append((sample.labels, sample.value))
    except ValueError:
        raise StateError("what it answers isn't in Prometheus' format; is this vLLM?") from None
    engines = {labels["phase"]: value for labels, value in series["isochunk_calibration"]}
    # With several data-parallel ranks: go on while any of them calibrates.
    known = (*CALIBRATING, INSTALLED, GIVEN_UP, OFF)
    phase = next((name for name in known if engines.get(name, 0) > 0), None)
    if phase is None:
        # prometheus_client adds its process metrics only where it serves a single process.
        is_one_process = "python_info" in series or not metrics.strip()
        raise StateError(HOW_TO_EXPORT if is_one_process else HOW_TO_ENABLE)
    models, errors, checks = (
        _by_stage(series[name], label)
        for name, label in (
            ("isochunk_latency_model", "coefficient"),
            ("isochunk_latency_model_standard_error", "coefficient"),
            ("isochunk_fit", "check"),
        )
    )
    overhead = {labels["coefficient"]: x for labels, x in series["isochunk_step_overhead"]}
    return ServerState(
        phase=phase,
        reason="; ".join(x["reason"] for x, _ in series["isochunk_fixed_chunks_info"]),
        fits=tuple(
            StageFit(
                checks[stage],
                # Left-overs of a server before this one don't count.
                LatencyModel.from_letters(models[stage]) if phase == INSTALLED else None,
                errors[stage],
            )
            for stage in sorted(checks)
        ),
        overhead=StepOverhead(overhead.get("c", 0.0), overhead.get("b", 0.0)),
        engine=next((labels for labels, _ in series["isochunk_engine_info"]), {}),
    )


def _by_stage(
    samples: list[tuple[dict[str, str], float]], label: str
) -> defaultdict[int, dict[str, float]]:
    """Stage -> value of ``label`` -> value."""
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for labels, value in samples:
        found[int(labels["stage"])][labels[label]] = value
    return found
