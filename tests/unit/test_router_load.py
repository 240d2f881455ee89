"""Who gets the next request: predicted prefill time, tokens in flight, ties."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk import LatencyModel
from isochunk.pd.router.instances import Instance, Pool
from isochunk.pd.router.prediction import TokenEstimate, prefill_ms, read_models
from isochunk.pd.router.request import PromptSize, parse
from isochunk.pd.router.settings import Address
from tests.unit.router_upstreams import deployment, until

STAGE = LatencyModel(fixed_ms=5.0, prefix_ms=0.0, token_ms=0.1, attention_ms=1e-5)
METRICS = """# HELP isochunk_latency_model Fitted coefficients.
# TYPE isochunk_latency_model gauge
isochunk_latency_model{{coefficient="c",stage="0"}} 5.0
isochunk_latency_model{{coefficient="gamma",stage="0"}} 0.0
isochunk_latency_model{{coefficient="b",stage="0"}} {b}
isochunk_latency_model{{coefficient="a",stage="0"}} 1e-05
vllm:other{{stage="0"}} 3.0
"""


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_instance(port: int = 1, stages: tuple[LatencyModel, ...] = (STAGE,)) -> Instance:
    return Instance("prefill", Address(host="h", port=port), up=True, stages=stages, clock=Clock())


def make_pool(role: str, *stages: tuple[LatencyModel, ...]) -> Pool:
    pool = Pool(role, [])  # type: ignore[arg-type]
    pool.instances = [make_instance(port + 1, s) for port, s in enumerate(stages)]
    return pool


def pass_time(instance: Instance, seconds: float) -> None:
    assert isinstance(instance.clock, Clock)
    instance.clock.now_s += seconds


def test_prefill_time_is_work_plus_the_best_number_of_chunks() -> None:
    work_ms = 0.1 * 10_000 + 1e-5 * 10_000**2
    assert prefill_ms((STAGE,), 10_000) == pytest.approx(work_ms + 5.0)
    # Four stages: K = sqrt(3 · 2000 / 5).
    assert prefill_ms((STAGE,) * 4, 10_000) == pytest.approx(work_ms + 5 * (3 * work_ms / 5) ** 0.5)
    slow = LatencyModel(fixed_ms=5.0, prefix_ms=0.0, token_ms=0.2, attention_ms=1e-5)
    assert prefill_ms((STAGE, slow), 10_000) == prefill_ms((slow, STAGE), 10_000)
    assert prefill_ms((STAGE, slow), 10_000) == prefill_ms((slow, slow), 10_000)


def test_models_are_read_from_metrics() -> None:
    text = METRICS.format(b=0.1)
    two = text + text.replace('stage="0"', 'stage="1"').replace(" 0.1\n", " 0.2\n")
    assert read_models(text.splitlines()) == (STAGE,)
    assert [m.token_ms for m in read_models(two.splitlines())] == [0.1, 0.2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        METRICS.format(b="NaN"),
        METRICS.format(b=-1),
        METRICS.format(b=0.1).replace('coefficient="b"', 'coefficient="z"'),
        METRICS.format(b=0.1).replace(',stage="0"', ""),
        METRICS.format(b=0.1).replace('isochunk_latency_model{coefficient="c"', 'x{c=""'),
        'isochunk_latency_model{stage="0"',
    ],
)
def test_metrics_without_a_usable_model(text: str) -> None:
    assert read_models(text.splitlines()) == ()


def test_remaining_time_drops_first_come_first_served_and_never_below_zero() -> None:
    instance = make_instance()
    with instance.leg(10_000), instance.leg(1000):
        first_ms, second_ms = prefill_ms((STAGE,), 10_000), prefill_ms((STAGE,), 1000)
        assert instance.remaining_ms() == pytest.approx(first_ms + second_ms)
        pass_time(instance, first_ms / 1000 + 0.010)
        assert instance.remaining_ms() == pytest.approx(second_ms - 10)
        pass_time(instance, 60)
        assert instance.remaining_ms() == 0
        with instance.leg(1000):
            assert instance.remaining_ms() == pytest.approx(second_ms)
    assert instance.remaining_ms() == 0
    assert not instance.legs


def test_a_model_that_arrives_or_goes_counts_for_requests_in_flight() -> None:
    instance = make_instance(stages=())
    with instance.leg(1000):
        assert instance.remaining_ms() == 0
        instance.set_stages((STAGE,))
        assert instance.remaining_ms() == pytest.approx(prefill_ms((STAGE,), 1000))
        instance.set_stages(())
        assert instance.remaining_ms() == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 100_000)),
            st.tuples(st.just("end"), st.integers(0, 10)),
            st.tuples(st.just("wait"), st.floats(0, 30)),
            st.tuples(st.just("model"), st.booleans()),
        )
    )
)
def test_load_is_never_negative_and_ends_at_zero(steps: list[tuple[str, float]]) -> None:
    instance = make_instance()
    stacks: list[ExitStack] = []
    for kind, value in steps:
        before_ms = instance.remaining_ms()
        if kind == "add":
            stacks.append(ExitStack())
            stacks[-1].enter_context(instance.leg(value))
        elif kind == "end" and stacks:
            stacks.pop(int(value) % len(stacks)).close()
            assert instance.remaining_ms() <= before_ms
        elif kind == "wait":
            pass_time(instance, value)
            assert instance.remaining_ms() == pytest.approx(max(0, before_ms - value * 1000))
        elif kind == "model":
            instance.set_stages((STAGE,) if value else ())
        assert instance.remaining_ms() >= 0
    for stack in stacks:
        stack.close()
    assert instance.remaining_ms() == 0
    assert instance.num_tokens == 0


def test_time_decides_not_the_number_of_requests() -> None:
    pool = make_pool("prefill", (STAGE,), (STAGE,))
    busy, other = pool.instances
    with busy.leg(50_000), other.leg(100), other.leg(100), other.leg(100):
        assert pool.pick(1000) is other
        for instance in pool.instances:
            pass_time(instance, 60)  # the long prefill is over by now, or as good as
        assert pool.pick(1000) is busy


def test_the_faster_server_is_preferred() -> None:
    slow = LatencyModel(fixed_ms=5.0, prefix_ms=0.0, token_ms=1.0, attention_ms=1e-5)
    pool = make_pool("prefill", (slow,), (STAGE,))
    with pool.instances[1].leg(1000):
        assert pool.pick(1000) is pool.instances[1]


def test_tokens_decide_while_a_server_has_no_model() -> None:
    pool = make_pool("prefill", (STAGE,), ())
    with pool.instances[0].leg(1000), pool.instances[1].leg(999), pool.instances[1].leg(2):
        assert pool.pick(1000) is pool.instances[0]


def test_decode_goes_by_tokens_then_requests_then_turns() -> None:
    pool = make_pool("decode", (), (), ())
    first, second, third = pool.instances
    assert [pool.pick(1) for _ in range(4)] == [first, second, third, first]
    with first.leg(100), second.leg(60), second.leg(40), third.leg(101):
        assert pool.pick(1) is first
        with first.leg(2):
            assert pool.pick(1) is second
            assert pool.pick(1, excluded=[second]) is third
            third.mark_down()
            assert pool.pick(1, excluded=[second]) is first
            assert pool.pick(1, excluded=[first, second]) is None


def test_tokens_per_character_are_learned() -> None:
    estimate = TokenEstimate()
    assert estimate.num_tokens(PromptSize(7, 0)) == 7
    assert estimate.num_tokens(PromptSize(0, 400)) == 100
    for _ in range(100):
        estimate.learn(PromptSize(0, 400), 200)
        estimate.learn(PromptSize(50, 0), 50)  # nothing to learn from token ids
    assert estimate.num_tokens(PromptSize(0, 400)) == pytest.approx(200, rel=0.01)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"prompt": "abcd"}', PromptSize(0, 4)),
        (b'{"prompt": ["abcd"]}', PromptSize(0, 4)),
        (b'{"prompt": [1, 2, 3]}', PromptSize(3, 0)),
        (b'{"prompt": [[1, 2, 3]]}', PromptSize(3, 0)),
        (b'{"prompt": []}', PromptSize(0, 0)),
        (b'{"messages": [{"content": "abc"}, {"content": [{"text": "de"}]}]}', PromptSize(0, 5)),
        (b'{"messages": [{"content": [{"url": "data:image/png;AAAA"}]}]}', PromptSize(0, 0)),
        (b'{"messages": 3}', PromptSize(0, 0)),
    ],
)
def test_prompt_sizes(body: bytes, expected: PromptSize) -> None:
    assert parse("/v1/completions", body).prompt == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"max_tokens": 9}', 9),
        (b'{"max_completion_tokens": 8, "max_tokens": 9}', 8),
        (b'{"max_completion_tokens": null, "max_tokens": 9}', 9),
        (b"{}", 512),
        (b'{"max_tokens": "x"}', 512),
    ],
)
def test_output_tokens_for_balancing(body: bytes, expected: int) -> None:
    assert parse("/v1/completions", body).max_output_tokens == expected


async def _five_prompts_at_once() -> tuple[int, int]:
    async with deployment(2, model_interval_s=0.02) as setup:
        slow, fast = setup.prefillers
        slow.metrics, fast.metrics = METRICS.format(b=1.0), METRICS.format(b=0.1)
        slow.fail = fast.fail = "hang"
        async with asyncio.timeout(5):
            while sum((await setup.metric("isochunk_router_model_known")).values()) < 2:
                await asyncio.sleep(0.01)
        body = {"prompt": [1] * 1000}
        flights = [
            asyncio.create_task(setup.client.post("/v1/completions", json=body)) for _ in range(5)
        ]
        await until(lambda: len(slow.calls) + len(fast.calls) == 5)
        predicted = await setup.metric("isochunk_router_predicted_prefill_ms")
        assert 0 < predicted[f"127.0.0.1:{fast.port}"] <= 5 * prefill_ms((STAGE,), 1000)
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await setup.assert_quiet()
        return len(slow.calls), len(fast.calls)


def test_models_published_by_the_servers_decide() -> None:
    # Five prompts of 0.1 s one after the other are done before one of 1 s.
    assert asyncio.run(_five_prompts_at_once()) == (0, 5)
