"""Corrects the latency models by when batches complete, as the engine itself sees it.

No worker is asked and no forward timed: the scheduler knows what it put into a batch, when, and
when that batch's output came back. A *run* is a sequence of sole-prefill batches that starts on
an empty pipeline; the flow-shop recurrence predicts its completions. In a full pipeline of equal
stages the intervals between them are ``t_k``, and ``t_k + (P−1)·(t_k − t_{k−1})`` where chunk
times rise.

What is learnt are four factors, on c, γ, b and a, the same for all stages (completions can't
tell stages apart). Identifiable is what the chunks excite: the machine's speed from the first
chunk on; the tilt along the prompt (γ and a against b) from a prompt of several chunks; c
against the rest only from chunks of different sizes, i.e. from a prompt in which attention makes
them shrink, from prompts of different lengths, or after a plan has been corrected.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace

import numpy as np

from isochunk.completions import Predictor, Run
from isochunk.factors import FactorBelief
from isochunk.makespan import FloatArray, Pipeline

logger = logging.getLogger(__name__)

MIN_TILT = 0.01
"""A correction goes into plans if it changes chunk times against each other by this, and by more
than the intervals' noise. A common factor changes no plan."""
MAX_CHUNKS = 512
"""A run ends after so many chunks; the next one starts on an empty pipeline."""
MAX_RUNS = 8
"""Of the runs that were not learnt from yet, so many of the last are kept."""
NUM_QUIET = 4
"""After so many runs without a correction, learning waits until there are as many again."""
WORTH_A_LINE = 0.1
"""How far a log factor in use has moved since the last line in the log."""


class CompletionFeedback:
    """Learns factors on the models' coefficients from batch completions.

    The engine calls ``scheduled`` and ``completed`` for every batch that has tokens, in order,
    on one clock; both only take notes. ``learn`` digests them.

    Args:
        pipeline: as fitted.
        num_in_flight: batches under way that were scheduled before this object was made.
    """

    def __init__(self, pipeline: Pipeline, num_in_flight: int = 0) -> None:
        self.fitted = pipeline
        self.pipeline = pipeline
        """As corrected by what was learnt so far."""
        self.belief = FactorBelief()
        self._used = np.ones(4)
        self._in_flight: deque[Run | None] = deque([None] * num_in_flight)
        self._run: Run | None = None
        self._to_learn: deque[Run] = deque(maxlen=MAX_RUNS)
        self._logged = self.belief.log_factors
        self._num_quiet = 0

    @property
    def num_in_flight(self) -> int:
        """Batches with tokens that are scheduled and not back yet."""
        return len(self._in_flight)

    @property
    def factors(self) -> FloatArray:
        """On c, γ, b and a, as believed now."""
        factors: FloatArray = np.exp(self.belief.log_factors)
        return factors

    def scheduled(self, now_ms: float, chunk: tuple[int, int] | None) -> None:
        """A batch went out: its only chunk as (cached, new) tokens, or None for anything else."""
        run = self._run
        if chunk is None or (run is not None and (run.is_broken or len(run.new) >= MAX_CHUNKS)):
            run = None
        elif not self._in_flight:
            run = Run(now_ms)
            self._to_learn.append(run)
        if run is not None and chunk is not None:
            run.add(now_ms, *chunk)
        self._run = run
        self._in_flight.append(run)

    def completed(self, now_ms: float) -> None:
        """The oldest batch in flight is back from the last stage."""
        run = self._in_flight.popleft() if self._in_flight else None
        if run is not None:
            run.complete(now_ms)

    def learn(self, min_new: int = 0) -> None:
        """Update ``pipeline`` by the completions that came since.

        Args:
            min_new: wait for so many of a run, or for the end of one that is shorter: a few
                intervals alone say little, not even how noisy they are. And for several
                runs where the last ones brought no correction. 0: don't wait.
        """
        runs = [
            run
            for run in self._to_learn
            if len(run.done_ms) - run.num_learnt >= min_new or run not in self._in_flight
        ]
        runs = [run for run in runs if len(run.done_ms) > run.num_learnt]
        num_fresh = sum(1 for run in runs if not run.num_learnt)
        if min_new and num_fresh < (NUM_QUIET if self._num_quiet >= NUM_QUIET else 1):
            return
        self._num_quiet += num_fresh
        under_way = (run for run in self._to_learn if run in self._in_flight)
        self._to_learn = deque(under_way, maxlen=MAX_RUNS)
        for run in runs:
            predictor = Predictor(self.fitted, run, run.num_learnt)
            belief = self.belief if run.num_learnt else self.belief.faded()
            self.belief = belief.update(
                run.intervals_ms[run.num_learnt :],
                predictor.intervals_ms,
                predictor.full_pipeline_ms,
            )
            run.num_learnt = len(run.done_ms)
            tilt = predictor.tilt(self._used, self.factors)
            if tilt > max(self.belief.noise, MIN_TILT):
                self._used, self.pipeline = self.factors, self.believed
                self._num_quiet = 0
                self._log_correction()

    @property
    def believed(self) -> Pipeline:
        """By all that was learnt, also what makes no difference to plans."""
        return self.fitted.scaled(*self.factors.tolist())

    def _log_correction(self) -> None:
        if np.abs(self.belief.log_factors - self._logged).max() > WORTH_A_LINE:
            self._logged = self.belief.log_factors
            c, g, b, a = self.factors.tolist()
            logger.info(
                "Dynamic chunking corrects the model by when batches complete: "
                f"c × {c:.2f}, γ × {g:.2f}, b × {b:.2f}, a × {a:.2f}"
            )


def feedback_of(policy: object) -> CompletionFeedback | None:
    """The feedback that a policy wants, if any."""
    return getattr(policy, "feedback", None)


def believed_by(policy: object, pipeline: Pipeline) -> Pipeline:
    """``pipeline`` with the models as a policy believes them now, if it learns."""
    feedback = feedback_of(policy)
    if feedback is None:
        return pipeline
    feedback.learn()
    return replace(pipeline, stages=feedback.believed.stages)
