import math

import pytest

from isochunk.latency import InvalidLatencyModelError, LatencyModel

MODEL = LatencyModel(fixed_ms=20.0, prefix_ms=0.002, token_ms=0.03, attention_ms=2e-6)


def test_predict_is_the_formula() -> None:
    expected = 20 + 0.002 * 5000 + 0.03 * 1000 + 2e-6 * (2 * 5000 * 1000 + 1000**2)
    assert MODEL.predict_ms(5000, 1000) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("coefficients", "named"),
    [
        ((-1, 0, 0, 1), "fixed_ms=-1"),
        ((1, math.nan, 0, 1), "prefix_ms=nan"),
        ((1, 0, math.inf, 1), "token_ms=inf"),
        ((1, 0, 0, -1e-9), "attention_ms=-1e-09"),
        ((0, 0, 0, 0), "all coefficients are 0"),
    ],
)
def test_bad_coefficients_are_named(coefficients: tuple[float, ...], named: str) -> None:
    with pytest.raises(InvalidLatencyModelError, match=named):
        LatencyModel(*coefficients)


def test_unreachable_target_gives_no_tokens() -> None:
    assert MODEL.solve_num_new(target_ms=20.0, num_cached=0) == 0
    assert MODEL.solve_num_new(target_ms=25.0, num_cached=10_000) == 0
    assert MODEL.solve_num_new(target_ms=math.nan, num_cached=0) == 0


def test_model_without_growth_has_no_limit() -> None:
    assert LatencyModel(5.0, 0.0, 0.0, 0.0).solve_num_new(10.0, 0) == math.inf
