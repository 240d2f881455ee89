import numpy as np
import pytest

from isochunk.latency import LatencyModel
from isochunk.overhead import StepOverhead, fit_step_overhead


def gaps_with_idle_time(fixed_ms: float, token_ms: float) -> list[tuple[int, float]]:
    """Half of the gaps are idle time too, up to half a second."""
    rng = np.random.default_rng(0)
    gaps = []
    for i, x in enumerate([256, 1024, 2048, 4096, 8192] * 8):
        idle_ms = float(rng.uniform(20, 500)) if i % 2 else 0.0
        gaps.append((x, fixed_ms + token_ms * x + idle_ms + float(rng.uniform(0, 1))))
    return gaps


@pytest.mark.parametrize(("fixed_ms", "token_ms"), [(12.0, 0.0), (5.0, 0.01), (0.0, 0.02)])
def test_overhead_is_the_lower_edge_of_the_gaps(fixed_ms: float, token_ms: float) -> None:
    overhead = fit_step_overhead(gaps_with_idle_time(fixed_ms, token_ms))
    for x in (256, 2048, 8192):
        found = overhead.fixed_ms + overhead.token_ms * x
        assert found == pytest.approx(fixed_ms + token_ms * x, abs=2.0)


def test_too_few_gaps_tell_nothing() -> None:
    assert fit_step_overhead([(1024, 12.0)] * 7) == StepOverhead()


def test_overhead_adds_to_a_step() -> None:
    model = LatencyModel(1.0, 0.1, 0.2, 0.3)
    step = StepOverhead(10.0, 0.5).add_to(model)
    assert step == LatencyModel(11.0, 0.1, 0.7, 0.3)
