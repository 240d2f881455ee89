import logging
from collections import Counter

import pytest

from isochunk.policies import ChunkReason
from isochunk.reporting import ChunkReporter


def test_reports_what_is_new_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    counts: Counter[ChunkReason] = Counter()
    exported: list[Counter[ChunkReason]] = []
    reporter = ChunkReporter(counts, 10.0, lambda: now[0], exported.append)
    with caplog.at_level(logging.INFO, logger="isochunk"):
        counts.update({ChunkReason.MODEL: 5, ChunkReason.OTHER_PREFILLS: 2})
        reporter.report()
        assert not caplog.records
        now[0] = 10.0
        counts[ChunkReason.MODEL] += 1
        reporter.report()
        now[0] = 20.0
        reporter.report()  # nothing new: silent
    (record,) = caplog.records
    assert record.getMessage().startswith("Dynamic chunking since last report: 6 chunks sized")
    assert "2 (other prefills present)" in record.getMessage()
    assert sum(exported, Counter()) == counts
