import math

from isochunk.policies import ChunkReason, Prefill
from isochunk.stage_timer import DeviceClock, HostClock, StageTimer
from isochunk.timings import Piece, Timing, TimingLedger

PIECES = (Piece(Prefill("r", 0, 100), 100, ChunkReason.CALIBRATION),)


def test_late_and_unknown_answers_are_harmless() -> None:
    ledger = TimingLedger()
    tag = ledger.tag(PIECES, 1)
    ledger.complete(None)
    ledger.complete(12345)
    assert not ledger.has_completed
    ledger.complete(tag)
    asked = ledger.ask()
    assert asked == [tag]
    assert not ledger.has_completed
    assert len(ledger.settle(asked, [(0, [Timing(tag, 0.0, 5.0)])])) == 1
    assert ledger.settle([], [(0, [Timing(tag, 0.0, 5.0)])]) == []  # the same answer again
    assert not ledger.outstanding


def test_answer_before_completion_keeps_the_tag_for_the_other_stages() -> None:
    ledger = TimingLedger()
    first, second = ledger.tag(PIECES, 1), ledger.tag(PIECES, 1)
    ledger.complete(first)
    asked = ledger.ask()
    early = [(0, [Timing(first, 0.0, 5.0), Timing(second, 0.0, 6.0)]), (1, [Timing(first, 0, 7.0)])]
    assert len(ledger.settle(asked, early)) == 3
    assert ledger.outstanding
    ledger.complete(second)
    (late,) = ledger.settle(ledger.ask(), [(0, []), (1, [Timing(second, 0.0, 8.0)])])
    assert (late.stage, late.latency_ms) == (1, 8.0)
    assert not ledger.outstanding


class Module:
    """Runs hooks like a torch module does."""

    def __init__(self) -> None:
        self.before: dict[int, object] = {}
        self.after: dict[int, object] = {}

    def register_forward_pre_hook(self, hook):
        return self._register(self.before, hook)

    def register_forward_hook(self, hook):
        return self._register(self.after, hook)

    def _register(self, hooks, hook):
        hooks[id(hook)] = hook

        class Handle:
            def remove(self) -> None:
                del hooks[id(hook)]

        return Handle()

    def __call__(self) -> None:
        for hook in self.before.values():
            hook(self, ())
        for hook in self.after.values():
            hook(self, (), None)


class SlowDevice(HostClock):
    """A device whose events pass when told."""

    passed = -1
    count = 0

    def mark(self) -> float:
        self.count += 1
        return float(self.count)

    def is_done(self, mark: float) -> bool:
        return mark <= self.passed


def test_times_tagged_forwards_only_and_leaves_nothing_behind() -> None:
    module = Module()
    timer = StageTimer(module, HostClock())
    module()
    assert timer.drain() == []
    timer.tag = 7
    module()
    timer.tag = None
    module()
    (timing,) = timer.drain()
    assert timing.tag == 7
    assert timing.latency_ms >= 0
    timer.remove()
    assert not module.before
    assert not module.after


def test_device_timings_come_only_when_the_device_has_passed_them() -> None:
    module, clock = Module(), SlowDevice()
    timer = StageTimer(module, clock)
    for timer.tag in (1, 2):
        module()
    assert timer.drain() == []
    clock.passed = 2
    assert [t.tag for t in timer.drain()] == [1]
    clock.passed = 4
    (second,) = timer.drain()
    assert second.tag == 2
    assert second.gap_ms == 1000  # marks 2 and 3 of a device that counts seconds


class StreamEvent:
    """An event of a stream that passes its marks one second after the other, when told."""

    count = passed = 0

    def record(self) -> None:
        StreamEvent.count += 1
        self.number = StreamEvent.count

    def query(self) -> bool:
        return self.number <= StreamEvent.passed

    def elapsed_time(self, end: "StreamEvent") -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end.number - self.number)


def test_a_devices_events_are_read_once_they_have_passed() -> None:
    waited = []
    clock = DeviceClock(StreamEvent, lambda: waited.append(True))
    module = Module()
    timer = StageTimer(module, clock)
    for timer.tag in (1, 2):
        module()
    assert timer.drain() == []
    StreamEvent.passed = 4
    assert [(t.tag, t.latency_ms, t.gap_ms) for t in timer.drain()] == [
        (1, 1000.0, math.inf),
        (2, 1000.0, 1000.0),
    ]
    clock.wait()
    assert waited == [True]
