import math

import numpy as np
import pytest

from isochunk.latency import LatencyModel
from isochunk.overhead import StepOverhead, TimedRun, fit_step_overhead

STAGES = (LatencyModel(5, 0, 0.02, 5e-6), LatencyModel(9, 0, 0.025, 5e-6))
SIZES = (
    (8192, 1024, 256, 6912),
    (256, 1024, 8192, 256, 1024, 5632),
    (4096, 2816, 2048, 1792, 1536),
)


def timed_run(sizes: tuple[int, ...], fixed_ms: float, token_ms: float, depth: int) -> TimedRun:
    """Forwards on two stages as they would run, told independently of the code under test."""
    ends = {(-1, 0): 0.0, (-1, 1): 0.0}
    latencies, gaps = [], []
    cached = 0
    for k, new in enumerate(sizes):
        overhead = fixed_ms + token_ms * new
        times = [stage.predict_ms(cached, new) for stage in STAGES]
        first = max(ends[k - 1, 0], ends.get((k - depth, 1), 0.0)) + overhead
        ends[k, 0] = first + times[0]
        second = max(ends[k, 0], ends[k - 1, 1]) + overhead
        ends[k, 1] = second + times[1]
        latencies.append(tuple(times))
        gaps.append((first - ends[k - 1, 0], second - ends[k - 1, 1]))
        cached += new
    gaps[0] = (math.inf, 2500.0)  # since whatever ran before
    return TimedRun(sizes, tuple(latencies), tuple(gaps))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize(("fixed_ms", "token_ms"), [(8.0, 0.0), (4.0, 0.003), (0.5, 0.01)])
def test_overhead_is_told_from_idle_time(fixed_ms: float, token_ms: float, depth: int) -> None:
    runs = [timed_run(sizes, fixed_ms, token_ms, depth) for sizes in SIZES]
    overhead = fit_step_overhead(runs, depth)
    assert overhead.fixed_ms == pytest.approx(fixed_ms, abs=0.05)
    assert overhead.token_ms == pytest.approx(token_ms, abs=1e-5)


def test_late_messages_and_noise_hardly_matter() -> None:
    rng = np.random.default_rng(0)
    runs = []
    for sizes in SIZES:
        run = timed_run(sizes, 6.0, 0.002, 2)
        late = rng.exponential(100.0, (len(sizes), 2)) * (rng.random((len(sizes), 2)) < 0.2)
        gaps = np.array(run.gaps_ms) + late + rng.uniform(0, 1.0, late.shape)
        runs.append(TimedRun(run.new, run.latencies_ms, tuple(map(tuple, gaps.tolist()))))
    overhead = fit_step_overhead(runs, 2)
    for new in (1024, 4096):
        expected = 6.5 + 0.002 * new
        assert overhead.fixed_ms + overhead.token_ms * new == pytest.approx(expected, rel=0.15)


def test_too_few_gaps_tell_nothing() -> None:
    assert fit_step_overhead([], 2) == StepOverhead()
    assert fit_step_overhead([timed_run((4096, 1024, 512), 8.0, 0.0, 2)], 2) == StepOverhead()
    unknown = timed_run((4096, 1024, 512, 256, 128, 64), 8.0, 0.0, 2)
    unknown = TimedRun(unknown.new, unknown.latencies_ms, ((math.inf, math.inf),) * 6)
    assert fit_step_overhead([unknown], 2) == StepOverhead()


def test_overhead_adds_to_a_step() -> None:
    model = LatencyModel(1.0, 0.1, 0.2, 0.3)
    step = StepOverhead(10.0, 0.5).add_to(model)
    assert step == LatencyModel(11.0, 0.1, 0.7, 0.3)
