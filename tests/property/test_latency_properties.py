import math

from hypothesis import given
from hypothesis import strategies as st

from isochunk.latency import LatencyModel

MODELS = st.builds(
    LatencyModel,
    fixed_ms=st.floats(0.01, 500),
    prefix_ms=st.floats(0, 0.01),
    token_ms=st.floats(1e-5, 1.0),
    attention_ms=st.one_of(st.just(0.0), st.floats(1e-10, 1e-4)),
)
TOKENS = st.integers(0, 2_000_000)


@given(MODELS, TOKENS, st.floats(0.5, 1e7))
def test_solve_inverts_predict(model: LatencyModel, num_cached: int, target_ms: float) -> None:
    num_new = model.solve_num_new(target_ms, num_cached)
    if num_new == 0:
        assert model.predict_ms(num_cached, 0) >= target_ms
    else:
        assert math.isclose(model.predict_ms(num_cached, num_new), target_ms, rel_tol=1e-9)


@given(MODELS, TOKENS, TOKENS, st.floats(0.5, 1e7))
def test_deeper_prefix_never_gets_a_larger_chunk(
    model: LatencyModel, one: int, other: int, target_ms: float
) -> None:
    shallow, deep = sorted((one, other))
    at_shallow = model.solve_num_new(target_ms, shallow)
    assert model.solve_num_new(target_ms, deep) <= at_shallow * (1 + 1e-12)
