"""How long a step should take when several prefills fill each other's bubbles.

With S_p the work of the waiting prompts on stage p and s_p what a step costs there besides its
tokens (c_p, and γ_p times their depth), K steps of equal time end after

    max_p (K·s_p + S_p)  +  Σ_q (s_q + S_q/K) − max_q (s_q + S_q/K)

the slowest stage's total and, for fill and drain, one step on each of the others. While stage p
is the slowest that is least at K = sqrt((ΣS − S_p) / s_p); for equal stages at
``sqrt((P−1)·S / c)``, as for a single prefill. With D < P batches in flight, a step costs at
least the D-th part of its way through all stages: one more "stage".

A prompt's first token pays the drain once, but only the steps before it: of N prompts that are
scheduled one after the other the mean is h = (N+1)/2N of all steps. And it is not only those:
*under load* every step also delays the prompts to come, w·ρ times as many as are there now. ρ is
how full the pipeline is when prompts arrive; w = LOAD_WEIGHT was chosen by simulation. So

    K = sqrt((ΣS − S_p) / ((h + w·ρ)·s_p))        T = max_p (s_p + S_p/K)

Under load steps are longer, but not so long that fewer than P hold all the work that waits or is
in flight: then the pipeline isn't full.

T is set anew only when the prompt set changes, and under load it moves slowly (INERTIA): a step
that is longer than the one before makes the next stages wait for the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isochunk.makespan import Pipeline
from isochunk.policies import Step
from isochunk.stages import dominant_stages

LOAD_WEIGHT = 1.5
"""w: prompts to come, per prompt that is there, where arrivals find the pipeline full."""
INERTIA = 0.8
"""How much of the last target stays where arrivals find the pipeline full."""
NUM_ARRIVALS = 16
"""Arrivals that ρ is the running mean of."""
NUM_HALVINGS = 8

Coefficients = tuple[float, float, float, float]


class StepTarget:
    """Target time of steps, from the work of the prompt set."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.value_ms = 0.0
        """Target time [ms] of a step on its slowest stage."""
        self._stages: list[Coefficients] = [
            (m.fixed_ms, m.prefix_ms, m.token_ms, m.attention_ms)
            for m in dominant_stages(pipeline.stages)
        ]
        c = sum(model.fixed_ms for model in pipeline.stages)
        g = sum(model.prefix_ms for model in pipeline.stages)
        b = sum(model.token_ms for model in pipeline.stages)
        a = sum(model.attention_ms for model in pipeline.stages)
        self._all_stages: Coefficients = (c, g, b, a)
        self._pace = self._stages
        depth = pipeline.depth
        self._num_full = min(pipeline.num_stages, depth)
        if depth < pipeline.num_stages:
            self._pace = [*self._stages, (c / depth, g / depth, b / depth, a / depth)]

    def update(
        self,
        work: tuple[float, float, float],
        num_prompts: int,
        in_flight: tuple[int, int],
        load: float,
    ) -> None:
        """Set ``value_ms``.

        Args:
            work: of the prompts that wait: tokens; token pairs of attention, Σ x(2L + x); and
                the depth [tokens] that γ counts.
            num_prompts: how many they are.
            in_flight: tokens and token pairs of the batches in flight.
            load: ρ.
        """
        tokens, area, depth = work
        stages = [(c + g * depth, b * tokens + a * area) for c, g, b, a in self._stages]
        pace = stages
        if self._pace is not self._stages:
            pace = [(c + g * depth, b * tokens + a * area) for c, g, b, a in self._pace]
        _, _, b, a = self._all_stages
        total_ms = b * tokens + a * area
        if not total_ms < math.inf:  # nor if it isn't a number
            self.value_ms = math.inf
            return
        share = (num_prompts + 1) / (2 * num_prompts)
        target_ms = _step_ms(stages, _num_steps(pace, total_ms, share))
        if load > 0.0:
            longer_ms = _step_ms(stages, _num_steps(pace, total_ms, share + LOAD_WEIGHT * load))
            more_tokens, more_area = in_flight
            tokens += more_tokens
            area += more_area
            full = [(c + g * depth, b * tokens + a * area) for c, g, b, a in self._stages]
            target_ms = max(target_ms, min(longer_ms, _step_ms(full, self._num_full)))
            if more_tokens and 0.0 < self.value_ms < math.inf:
                target_ms += INERTIA * load * (self.value_ms - target_ms)
        self.value_ms = target_ms


def _step_ms(stages: Sequence[tuple[float, float]], num_steps: float) -> float:
    if len(stages) == 1:  # the hot path
        step_ms, work_ms = stages[0]
        return step_ms + work_ms / num_steps
    return max(step_ms + work_ms / num_steps for step_ms, work_ms in stages)


def _ideal_steps(step_ms: float, work_ms: float, total_ms: float, weight: float) -> float:
    """K ≥ 1 that is best while this stage is the slowest."""
    if step_ms <= 0.0:
        return math.inf
    return max(math.sqrt(max(total_ms - work_ms, 0.0) / (weight * step_ms)), 1.0)


def _num_steps(pace: Sequence[tuple[float, float]], total_ms: float, weight: float) -> float:
    """K ≥ 1 that is best where the slowest stage counts ``weight`` times."""
    if len(pace) == 1:
        return _ideal_steps(*pace[0], total_ms, weight)
    ideal = [_ideal_steps(*stage, total_ms, weight) for stage in pace]
    low, high = min(ideal), max(ideal)
    if high in (low, math.inf):
        return low
    # The slowest stage depends on K; its ideal K says in which direction the best one lies.
    for _ in range(NUM_HALVINGS):
        middle = math.sqrt(low * high)
        slowest = max(range(len(pace)), key=lambda p: middle * pace[p][0] + pace[p][1])
        if ideal[slowest] > middle:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


class OfferedLoad:
    """ρ: how full the pipeline is when prompts arrive, from 0 (idle) to 1, a running mean.

    In a closed loop of enough prompts it is 1. Prompts that arrive together are one arrival.

    Args:
        num_full: batches in flight that fill the pipeline.
    """

    def __init__(self, num_full: int) -> None:
        self.value = 0.0
        self.follows_others = False
        """Whether last chunks of other prompts may be in flight, besides those that wait."""
        self._num_full = num_full
        self._num_arrivals = 0
        self._ids: list[str] = []
        self._steps_since_end = num_full

    def begin_step(self, step: Step, ids: list[str], num_in_flight: int) -> None:
        """Note who has come and gone. ``ids``: of the first prefills."""
        self._steps_since_end += 1
        if ids != self._ids:
            known, now = set(self._ids), set(ids)
            if not known <= now:
                self._steps_since_end = 0
            has_come, self._ids = not now <= known, ids
        else:
            has_come = False
        self.follows_others = step.num_others > 0 and self._steps_since_end < self._num_full
        if has_come:
            fullness = min(num_in_flight / max(self._num_full - 1, 1), 1.0)
            self._num_arrivals = min(self._num_arrivals + 1, NUM_ARRIVALS)
            self.value += (fullness - self.value) / self._num_arrivals
