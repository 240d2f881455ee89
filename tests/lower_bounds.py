"""Lower bounds of makespans, to hold the exact recurrence against."""

import numpy as np

from isochunk.makespan import FloatArray, IntArray, Pipeline, stage_times_ms


def lower_bounds_ms(
    pipeline: Pipeline, starts: IntArray, ends: IntArray, num_chunks: IntArray
) -> FloatArray:
    """Lower bounds [ms] of the makespans: for each stage, fill it, keep it busy, drain it.

    A stage s can't start before the first chunk has passed the stages ahead, is then busy for
    the sum of its times, and the last chunk has still to pass the stages behind.
    """
    times = stage_times_ms(pipeline, starts, ends)
    rows = np.arange(len(num_chunks))
    valid = np.arange(starts.shape[1]) < num_chunks[:, None]
    busy = np.where(valid[..., None], times, 0.0).sum(axis=1)
    first, last = times[:, 0], times[rows, num_chunks - 1]
    fill = np.cumsum(first, axis=1) - first
    drain = np.cumsum(last[:, ::-1], axis=1)[:, ::-1] - last
    bounds: FloatArray = (fill + busy + drain).max(axis=1)
    return bounds
