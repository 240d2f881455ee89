"""Chunk counts, calibration and latency model as Prometheus metrics of the process that schedules.

Where another process serves ``/metrics`` (vLLM's API server), they reach it if
PROMETHEUS_MULTIPROC_DIR was set before launch, as ``isochunk serve`` does. With data
parallelism each rank calibrates for itself: ``isochunk_calibration`` then counts ranks, and
models are those of the rank that installed last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import prometheus_client

from isochunk import __version__
from isochunk.calibration import CalibrationPhase
from isochunk.controller import ChunkController
from isochunk.fitting import FitReport
from isochunk.latency import LETTERS
from isochunk.policies import ChunkReason

OFF = "off"
"""The phase of an engine whose chunks stay fixed without a calibration."""

CHUNKS = prometheus_client.Counter(
    "isochunk_chunks", "Prefill chunks by the reason for their size.", ["reason"]
)
INSTALLED = prometheus_client.Gauge(
    "isochunk_model_installed", "1 once the model is installed.", multiprocess_mode="max"
)
CALIBRATION = prometheus_client.Gauge(
    "isochunk_calibration", "Engines in this phase.", ["phase"], multiprocess_mode="sum"
)
FIXED = prometheus_client.Gauge(
    "isochunk_fixed_chunks_info", "Why chunks stay fixed.", ["reason"], multiprocess_mode="max"
)
ENGINE = prometheus_client.Gauge(
    "isochunk_engine_info",
    "What the model holds for.",
    [
        "version",
        "device",
        "tensor_parallel_size",
        "max_num_batched_tokens",
        "alignment",
        "policy",
        "max_in_flight",
        "spare_batch",
    ],
    multiprocess_mode="max",
)
MODEL = prometheus_client.Gauge(
    "isochunk_latency_model",
    "Installed t(L, x) = c + gamma*L + b*x + a*(2*L*x + x*x): ms and tokens.",
    ["stage", "coefficient"],
    multiprocess_mode="mostrecent",
)
STANDARD_ERROR = prometheus_client.Gauge(
    "isochunk_latency_model_standard_error",
    "Standard errors of the coefficients, in their units.",
    ["stage", "coefficient"],
    multiprocess_mode="mostrecent",
)
OVERHEAD = prometheus_client.Gauge(
    "isochunk_step_overhead",
    "c + b*x between a stage's forwards: ms and tokens.",
    ["coefficient"],
    multiprocess_mode="mostrecent",
)
FIT = prometheus_client.Gauge(
    "isochunk_fit",
    "Diagnostics of the last fit; errors are relative.",
    ["stage", "check"],
    multiprocess_mode="mostrecent",
)


def export(new: Counter[ChunkReason]) -> None:
    """Add chunks to the counters."""
    for reason, count in new.items():
        CHUNKS.labels(reason.value).inc(count)


def export_off(reason: str) -> None:
    """Chunks of this engine stay fixed, whatever the calibration has found so far."""
    FIXED.labels(reason).set(1)
    INSTALLED.set(0)
    _set_phase(OFF)


class CalibrationExporter:
    """Keeps the metrics of a controller's calibration up to date.

    Args:
        controller: whose calibration.
        device: what it runs on, e.g. "cuda".
        tensor_parallel_size: ranks of a stage.
    """

    def __init__(self, controller: ChunkController, device: str, tensor_parallel_size: int) -> None:
        self._controller = controller
        self._exported: tuple[CalibrationPhase, list[FitReport]] | None = None
        calibrator, policy = controller.calibrator, controller.settings.policy
        ENGINE.labels(
            __version__,
            device,
            tensor_parallel_size,
            calibrator.budget,
            controller.alignment,
            policy,
            controller.max_in_flight,
            str(controller.may_spare).lower(),
        ).set(1)

    def export(self) -> None:
        """Call whenever it may have moved on; cheap if it hasn't."""
        calibrator = self._controller.calibrator
        if self._exported == (calibrator.phase, calibrator.reports):
            return
        self._exported = (calibrator.phase, calibrator.reports)
        for stage, report in enumerate(calibrator.reports):
            _export_fit(str(stage), report)
        # The phase last: whoever sees it can read what led to it.
        if calibrator.phase is CalibrationPhase.GIVEN_UP:
            FIXED.labels(calibrator.reason).set(1)
        elif calibrator.phase is CalibrationPhase.INSTALLED:
            for stage, model in enumerate(calibrator.models):
                for name, value in asdict(model).items():
                    MODEL.labels(str(stage), LETTERS[name]).set(value)
            OVERHEAD.labels("c").set(self._controller.step_overhead.fixed_ms)
            OVERHEAD.labels("b").set(self._controller.step_overhead.token_ms)
        INSTALLED.set(calibrator.phase is CalibrationPhase.INSTALLED)
        _set_phase(calibrator.phase)


def _set_phase(phase: str) -> None:
    for known in (*CalibrationPhase, OFF):
        CALIBRATION.labels(known.replace(" ", "_")).set(known == phase)


def _export_fit(stage: str, report: FitReport) -> None:
    checks = {
        "accepted": report.accepted,
        "num_samples": report.num_samples,
        "num_shapes": report.num_shapes,
        "num_outliers": len(report.outliers),
        "median_error": report.median_error,
        "max_error": report.max_error,
        "prediction_error": report.prediction_error,
        "condition_number": report.condition_number,
    }
    for check, value in checks.items():
        FIT.labels(stage, check).set(value)
    for name, error in report.standard_errors.items():
        STANDARD_ERROR.labels(stage, LETTERS[name]).set(error)
