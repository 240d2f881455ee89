"""The periodic log line about chunk sizes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from isochunk.policies import ChunkReason

logger = logging.getLogger(__name__)


class ChunkReporter:
    """Logs, at most once per interval, the chunks since the last report by reason.

    Args:
        counts: running totals, owned by the controller.
        interval_s: seconds between reports.
        clock: monotonic seconds.
        export: called with what has been added since its last call.
    """

    def __init__(
        self,
        counts: Counter[ChunkReason],
        interval_s: float,
        clock: Callable[[], float],
        export: Callable[[Counter[ChunkReason]], None],
    ) -> None:
        self._counts = counts
        self._interval_s = interval_s
        self._clock = clock
        self._export = export
        self._exported: Counter[ChunkReason] = Counter()
        self._reported: Counter[ChunkReason] = Counter()
        self._next_s = clock() + interval_s

    def report(self) -> None:
        """Call once per step; cheap when there is nothing new."""
        if self._counts != self._exported:
            self._export(self._counts - self._exported)
            self._exported = self._counts.copy()
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + self._interval_s
        new, self._reported = self._counts - self._reported, self._counts.copy()
        if new:
            logger.info(
                "Dynamic chunking since last report: %d chunks sized from the model, %d by the "
                "calibration; fixed budget for %d (no equal-latency chunk reachable), "
                "%d (other prefills present), %d (no model, or not to be split)",
                *(new[reason] for reason in ChunkReason),
            )
