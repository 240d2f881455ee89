"""Golden fits: coefficients recovered within their standard errors, and refusals by kind."""

import math
import random

import numpy as np
import pytest

from isochunk.fitting import ChunkSample, FitReport, Refusal, fit_latency_model, sweep_slope
from isochunk.latency import LatencyModel

GPU_LIKE = LatencyModel(fixed_ms=20.0, prefix_ms=0.002, token_ms=0.03, attention_ms=2e-6)
CPU_LIKE = LatencyModel(fixed_ms=10.0, prefix_ms=0.001, token_ms=0.06, attention_ms=2e-5)
COEFFICIENTS = ("fixed_ms", "prefix_ms", "token_ms", "attention_ms")


def calibration_samples(
    model: LatencyModel, rng: np.random.Generator, noise: float, num_prompts: int = 3
) -> list[ChunkSample]:
    """Prompts of 64K tokens in chunks that alternate between 8192 and 2048."""
    samples = []
    for prompt in range(num_prompts):
        num_cached, i = 0, prompt % 2
        while num_cached < 65536:
            num_new = min((8192, 2048)[i % 2], 65536 - num_cached)
            ms = model.predict_ms(num_cached, num_new) * (1 + noise * rng.standard_normal())
            samples.append(ChunkSample(num_cached, num_new, float(ms)))
            num_cached, i = num_cached + num_new, i + 1
    return samples


def sweep_of(model: LatencyModel, rng: np.random.Generator) -> list[tuple[int, float]]:
    return [
        (x, float((model.fixed_ms + model.token_ms * x) * (1 + 0.02 * rng.standard_normal())))
        for x in range(340, 8193, 340)
    ]


def pulls(report: FitReport, truth: LatencyModel) -> list[float]:
    assert report.model is not None
    return [
        (getattr(report.model, name) - getattr(truth, name)) / report.standard_errors[name]
        for name in COEFFICIENTS
        if report.standard_errors[name] > 0
    ]


@pytest.mark.parametrize("truth", [GPU_LIKE, CPU_LIKE])
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])
def test_coefficients_within_their_standard_errors(truth: LatencyModel, noise: float) -> None:
    all_pulls: list[float] = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        report = fit_latency_model(calibration_samples(truth, rng, noise), sweep_of(truth, rng))
        assert report.accepted, report
        all_pulls += pulls(report, truth)
    squares = np.square(all_pulls)
    assert math.sqrt(squares.mean()) < 1.5  # 1 if the errors are right; much less is no merit
    assert np.mean(squares < 4) > 0.9
    assert squares.max() < 36


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_outliers_and_a_cold_first_sample_change_little_and_are_named(noise: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        samples = calibration_samples(GPU_LIKE, rng, noise)
        cold = ChunkSample(samples[0].num_cached, samples[0].num_new, samples[0].latency_ms * 30)
        samples[0] = cold
        for i in rng.choice(len(samples) - 1, size=len(samples) // 10, replace=False) + 1:
            s = samples[i]
            samples[i] = ChunkSample(s.num_cached, s.num_new, s.latency_ms * rng.choice([0.4, 3]))
        report = fit_latency_model(samples, sweep_of(GPU_LIKE, rng))
        assert report.accepted, report
        assert cold in report.outliers
        assert len(report.outliers) >= 1 + len(samples) // 10
        assert max(abs(p) for p in pulls(report, GPU_LIKE)) < 5


def test_noise_free_samples_give_the_exact_model() -> None:
    rng = np.random.default_rng(0)
    report = fit_latency_model(calibration_samples(CPU_LIKE, rng, 0.0), sweep_of(CPU_LIKE, rng))
    assert report.accepted
    assert report.max_error < 1e-3
    assert str(report.model) in str(report)


def test_sweep_of_other_forwards_is_only_a_hint() -> None:
    """The real cost per token may differ from the attention-free one by half."""
    rng = np.random.default_rng(1)
    sweep = [(x, 5 + 0.6 * CPU_LIKE.token_ms * x) for x in range(300, 8000, 300)]
    report = fit_latency_model(calibration_samples(CPU_LIKE, rng, 0.01), sweep)
    assert report.accepted
    assert report.model is not None
    assert report.model.token_ms == pytest.approx(CPU_LIKE.token_ms, rel=0.1)


def test_sweep_slope_ignores_one_slow_forward() -> None:
    sweep = [(x, 4 + 0.05 * x) for x in range(100, 2500, 100)]
    sweep[3] = (sweep[3][0], 5000.0)
    assert sweep_slope(sweep) == pytest.approx(0.05, rel=0.02)
    assert sweep_slope([(100, 5.0)]) is None
    assert sweep_slope([(100, math.nan), (200, 3.0)]) is None


def test_refuses_too_few_shapes() -> None:
    report = fit_latency_model([ChunkSample(0, 100, 5.0)] * 50)
    assert report.refusal is Refusal.TOO_FEW
    assert "1 different" in report.detail


def test_refuses_samples_without_prefix() -> None:
    """Case: only short prompts so far, nearly linear."""
    samples = [ChunkSample(0, x, CPU_LIKE.predict_ms(0, x)) for x in range(512, 8193, 512)]
    report = fit_latency_model(samples)
    assert report.refusal is Refusal.NOT_IDENTIFIABLE


def test_refuses_a_model_without_attention_growth() -> None:
    """Linear-attention or hybrid models: time doesn't grow with the prefix."""
    flat = LatencyModel(20.0, 0.0, 0.03, 0.0)
    rng = np.random.default_rng(2)
    report = fit_latency_model(calibration_samples(flat, rng, 0.02), sweep_of(flat, rng))
    assert report.refusal is Refusal.NOT_IDENTIFIABLE
    assert "cannot be told from 0" in report.detail


@pytest.mark.parametrize("seed", range(10))
def test_refuses_pure_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [
        ChunkSample(s.num_cached, s.num_new, float(rng.uniform(50, 500)))
        for s in calibration_samples(GPU_LIKE, rng, 0.0)
    ]
    assert not fit_latency_model(samples).accepted


def test_refuses_sliding_window_growth() -> None:
    """Growth that stops at a window isn't the model: the report says so."""
    rng = np.random.default_rng(3)
    samples = [
        ChunkSample(
            s.num_cached, s.num_new, CPU_LIKE.predict_ms(min(s.num_cached, 4096), s.num_new)
        )
        for s in calibration_samples(CPU_LIKE, rng, 0.0)
    ]
    assert not fit_latency_model(samples).accepted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_impossible_times_are_outliers(bad: float) -> None:
    rng = np.random.default_rng(4)
    samples = calibration_samples(CPU_LIKE, rng, 0.01)
    samples[5] = ChunkSample(samples[5].num_cached, samples[5].num_new, bad)
    report = fit_latency_model(samples)
    assert report.accepted
    assert samples[5] in report.outliers


def test_the_sweep_stays_a_loose_prior_where_an_iteration_puts_b_at_zero() -> None:
    model = LatencyModel(10.0, 0.001, 0.06, 2e-5)
    sweep = [(x, 8 + model.token_ms * x) for x in range(170, 4097, 170)]
    shapes = [(L, x) for x in (4096, 512, 128) for L in range(0, 32768, 8192)]
    for seed in (32, 57, 85, 94):
        rng = random.Random(seed)
        samples = [ChunkSample(*s, model.predict_ms(*s) * rng.uniform(0.2, 1.8)) for s in shapes]
        report = fit_latency_model(samples, sweep)
        assert report.model is not None
        for name, error in report.standard_errors.items():
            if value := getattr(report.model, name):
                assert error > 0.005 * value, (seed, name, str(report))
