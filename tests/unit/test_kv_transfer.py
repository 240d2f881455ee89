"""Sender and receiver over real sockets, with NumPy arrays as caches."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from isochunk.pd.transfer.proof import sign
from isochunk.pd.transfer.receiver import Address, Receiver, RemoteBlocks
from isochunk.pd.transfer.sender import Sender
from isochunk.pd.transfer.shard import Rank, Shard, heads_of_rank

NUM_BLOCKS = 32
HEAD_BYTES = 6
NUM_LAYERS = 6
TOTAL_HEADS = 4


@dataclass
class FakeRank:
    """A rank's cache of (layer, block, head, byte) and its shard."""

    shard: Shard
    cache: dict[str, np.ndarray]
    changed: threading.Event = field(default_factory=threading.Event)

    def read(self, layer: str, ids: Any, first: int, count: int) -> memoryview:
        return memoryview(self.cache[layer][list(ids), first : first + count].reshape(-1))

    def write(self, layer: str, ids: Any, first: int, count: int, data: bytes) -> None:
        values = np.frombuffer(data, np.uint8).reshape(len(ids), count, HEAD_BYTES)
        self.cache[layer][list(ids), first : first + count] = values


def truth(num_heads: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shape = (NUM_BLOCKS, num_heads, HEAD_BYTES)
    return {f"layers.{n}": rng.integers(0, 256, shape, dtype=np.uint8) for n in range(NUM_LAYERS)}


def make_ranks(pp: int, tp: int, total_heads: int, filled: bool, **change: Any) -> list[FakeRank]:
    whole = truth(total_heads)
    ranks = []
    for stage in range(pp):
        layers = [f"layers.{n}" for n in range(NUM_LAYERS)][
            stage * NUM_LAYERS // pp : (stage + 1) * NUM_LAYERS // pp
        ]
        for rank in range(tp):
            heads = heads_of_rank(total_heads, rank, tp)
            shard = Shard(
                **{
                    "rank": Rank(pp=stage, tp=rank),
                    "layers": tuple(layers),
                    "first_head": heads.start,
                    "num_heads": len(heads),
                    "total_heads": total_heads,
                    "block_size": 16,
                    "head_bytes": HEAD_BYTES,
                    "storage": "uint8",
                }
                | change
            )
            cache = {n: whole[n][:, heads.start : heads.stop] * np.uint8(filled) for n in layers}
            ranks.append(FakeRank(shard, cache))
    return ranks


@contextmanager
def senders(
    ranks: list[FakeRank], claim_timeout_s: float = 5.0, queue_timeout_s: float = 5.0
) -> Iterator[list[Sender]]:
    with ExitStack() as stack:
        made = []
        for rank in ranks:
            sender = Sender(
                rank.shard,
                rank.read,
                host="127.0.0.1",
                claim_timeout_s=claim_timeout_s,
                queue_timeout_s=queue_timeout_s,
                changed=rank.changed,
            )
            stack.callback(sender.close)
            made.append(sender)
        yield made


@contextmanager
def receivers(ranks: list[FakeRank], stall_timeout_s: float = 5.0) -> Iterator[list[Receiver]]:
    with ExitStack() as stack:
        made = []
        for number, rank in enumerate(ranks):
            receiver = Receiver(
                rank.shard,
                rank.write,
                consumer=number,
                num_consumers=len(ranks),
                stall_timeout_s=stall_timeout_s,
                changed=rank.changed,
            )
            stack.callback(receiver.close)
            made.append(receiver)
        yield made


def remote_of(
    ranks: list[FakeRank], sending: list[Sender], block_ids: Sequence[int] = (3,), sequence: int = 0
) -> RemoteBlocks:
    return RemoteBlocks(
        remote_sequence=sequence,
        remote_num_tokens=100,
        remote_block_ids=tuple(block_ids),
        remote_addresses=tuple(
            Address(
                rank=rank.shard.rank,
                host="127.0.0.1",
                port=sender.port,
                key=sign(sender.secret, sequence, block_ids),
            )
            for rank, sender in zip(ranks, sending, strict=True)
        ),
    )


def wait_until(condition: Callable[[], Any], timeout_s: float = 5.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.002)
    raise AssertionError("timed out")


def result(receiver: Receiver) -> bool:
    """Wait for a request's end; whether it was received."""
    ended, failed = wait_until(lambda: r if (r := receiver.take_results())[0] else None)
    assert ended == {"d"}
    return not failed


SIZES = [(1, 1), (2, 1), (3, 2), (1, 4), (2, 8)]


@pytest.mark.parametrize("total_heads", [TOTAL_HEADS, 1])
@pytest.mark.parametrize("consumer", [(1, 1), (2, 1), (1, 2), (2, 8)])
@pytest.mark.parametrize("producer", SIZES)
def test_every_byte_arrives_for_any_parallel_sizes(
    producer: tuple[int, int], consumer: tuple[int, int], total_heads: int
) -> None:
    source = make_ranks(*producer, total_heads, filled=True)
    target = make_ranks(*consumer, total_heads, filled=False)
    source_ids, target_ids = [5, 2, 9, 30], [7, 8, 1]  # the first block is cached already
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        remote = remote_of(source, sending, source_ids)
        for receiver in receiving:
            receiver.fetch("d", remote, target_ids, first_block=1)
        assert all(result(receiver) for receiver in receiving)
        for sender in sending:
            assert wait_until(sender.take_finished) == {"r"}
    whole = truth(total_heads)
    for rank in target:
        for layer, cache in rank.cache.items():
            heads = slice(rank.shard.heads.start, rank.shard.heads.stop)
            expected = np.zeros_like(cache)
            expected[target_ids] = whole[layer][source_ids[1:], heads]
            assert np.array_equal(cache, expected)


def one_pair() -> tuple[list[FakeRank], list[FakeRank]]:
    return make_ranks(2, 1, 1, filled=True), make_ranks(1, 1, 1, filled=False)


def test_blocks_stay_held_until_the_last_consumer_rank_is_done() -> None:
    source, target = make_ranks(1, 1, 2, filled=True), make_ranks(1, 2, 2, filled=False)
    with senders(source) as sending, receivers(target) as receiving:
        sending[0].hold(0, "r")
        remote = remote_of(source, sending, [1, 2])
        receiving[0].fetch("d", remote, [1, 2], 0)
        assert result(receiving[0])
        time.sleep(0.05)
        assert not sending[0].take_finished()
        receiving[1].fetch("d", remote, [1, 2], 0)
        assert result(receiving[1])
        assert wait_until(sending[0].take_finished) == {"r"}


def test_a_claim_may_come_before_the_hold_and_keeps_it() -> None:
    source, target = one_pair()
    with senders(source, claim_timeout_s=0.2) as sending, receivers(target) as receiving:
        remote = remote_of(source, sending)
        receiving[0].claim("d", remote)
        time.sleep(0.05)
        for sender in sending:
            sender.hold(0, "r")
        time.sleep(0.5)  # well past the timeout of an unclaimed hold
        assert not any(sender.take_finished() for sender in sending)
        receiving[0].fetch("d", remote, [3], 0)
        assert result(receiving[0])


def test_a_transfer_need_not_wait_for_the_engine_to_tell_of_the_hold() -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        receiving[0].fetch("d", remote_of(source, sending), [3], 0)
        assert result(receiving[0])
        time.sleep(0.05)
        for sender in sending:
            assert not sender.take_finished()
            sender.hold(0, "r")
            assert wait_until(sender.take_finished) == {"r"}
        # A later prompt's blocks are still to come, an earlier one's are gone.
        for sequence, is_had in ((5, True), (0, False)):
            remote = remote_of(source, sending, sequence=sequence)
            receiving[0].fetch("d", remote, [3], 0)
            assert result(receiving[0]) is is_had


def test_release_frees_the_blocks_and_reports_nothing() -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        receiving[0].release("d", remote_of(source, sending))
        for sender in sending:
            assert wait_until(sender.take_finished) == {"r"}
        assert receiving[0].take_results() == (set(), set())


def test_unclaimed_blocks_are_released_in_time_and_a_late_claim_fails_at_once() -> None:
    source, target = one_pair()
    with senders(source, claim_timeout_s=0.1) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
            assert wait_until(sender.take_finished) == {"r"}
        start = time.monotonic()
        receiving[0].fetch("d", remote_of(source, sending), [3], 0)
        assert not result(receiving[0])
        assert time.monotonic() - start < 1.0
        assert not any(sender.take_finished() for sender in sending)  # once, not twice


def test_a_consumer_that_dies_gives_its_claim_back() -> None:
    source, target = one_pair()
    with senders(source, claim_timeout_s=0.2) as sending:
        for sender in sending:
            sender.hold(0, "r")
        with receivers(target) as receiving:
            receiving[0].claim("d", remote_of(source, sending))
            time.sleep(0.4)
            assert not any(sender.take_finished() for sender in sending)
        for sender in sending:
            assert wait_until(sender.take_finished) == {"r"}


def test_a_consumer_that_is_stuck_does_not_hold_blocks_for_ever() -> None:
    source, target = one_pair()
    with (
        senders(source, claim_timeout_s=0.1, queue_timeout_s=0.2) as sending,
        receivers(target) as receiving,
    ):
        for sender in sending:
            sender.hold(0, "r")
        remote = remote_of(source, sending)
        receiving[0].claim("d", remote)
        for sender in sending:
            assert wait_until(sender.take_finished) == {"r"}
        receiving[0].fetch("d", remote, [3], 0)
        assert not result(receiving[0])


def test_a_repeated_transfer_is_harmless() -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        remote = remote_of(source, sending)
        receiving[0].fetch("d", remote, [3], 0)
        receiving[0].fetch("d", remote, [3], 0)
        assert result(receiving[0])
        for sender in sending:
            assert wait_until(sender.take_finished) == {"r"}
        receiving[0].fetch("d", remote, [3], 0)
        assert not result(receiving[0])  # they are gone, and it says so at once
        assert not any(sender.take_finished() for sender in sending)


FAULTS: dict[str, dict[str, Any]] = {
    "blocks of somebody else": {"remote_block_ids": (4,)},
    "number of somebody else": {"remote_sequence": 1},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_blocks_of_others_cannot_be_had(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    source, target = one_pair()
    with senders(source, claim_timeout_s=0.3) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        remote = remote_of(source, sending).model_copy(update=FAULTS[fault])
        receiving[0].fetch("d", remote, [3], 0)
        assert not result(receiving[0])
        assert not target[0].cache["layers.0"].any()
        for sender in sending:  # and the rightful hold still runs its course
            assert wait_until(sender.take_finished) == {"r"}
    assert "the key is not that of these blocks" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 32), ("storage", "bfloat16"), ("head_bytes", 8)]
)
def test_a_layout_that_does_not_fit_is_refused_by_name(
    field: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_ranks(1, 1, 1, filled=True, **{field: value})
    target = make_ranks(1, 1, 1, filled=False)
    with senders(source) as sending, receivers(target) as receiving:
        sending[0].hold(0, "r")
        receiving[0].fetch("d", remote_of(source, sending), [3], 0)
        assert not result(receiving[0])
    assert f"{field}={value!r}" in caplog.text
    assert "prefill instance" in caplog.text


def test_a_missing_layer_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    source = make_ranks(2, 1, 1, filled=True)[:1]
    target = make_ranks(1, 1, 1, filled=False)
    with senders(source) as sending, receivers(target) as receiving:
        sending[0].hold(0, "r")
        receiving[0].fetch("d", remote_of(source, sending), [3], 0)
        assert not result(receiving[0])
    assert "layers.3" in caplog.text


@pytest.mark.parametrize("blocks", [([3, 4], 0), ([3], 1)], ids=["too many", "beyond the end"])
def test_blocks_that_are_not_held_fail_the_transfer(blocks: tuple[list[int], int]) -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        receiving[0].fetch("d", remote_of(source, sending), *blocks)
        assert not result(receiving[0])


def test_a_cache_that_cannot_be_written_fails_the_request() -> None:
    source, target = one_pair()

    def write(*_: Any) -> None:
        raise RuntimeError("index out of range")

    target[0].write = write  # type: ignore[method-assign]
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        receiving[0].fetch("d", remote_of(source, sending), [3], 0)
        assert not result(receiving[0])


@pytest.mark.parametrize("host", ["", "no such host", "a" * 70, "x\udc80"])
def test_an_address_that_makes_no_sense_fails_the_request(host: str) -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        remote = remote_of(source, sending)
        bad = remote.remote_addresses[0].model_copy(update={"host": host})
        remote = remote.model_copy(update={"remote_addresses": (bad,)})
        receiving[0].fetch("d", remote, [3], 0)
        assert not result(receiving[0])


def test_a_stage_that_cannot_be_reached_fails_the_transfer_fast() -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        remote = remote_of(source, sending)
        sending[1].close()
        start = time.monotonic()
        receiving[0].fetch("d", remote, [3], 0)
        assert not result(receiving[0])
        assert time.monotonic() - start < 1.0


def test_a_stage_that_dies_while_a_request_is_queued_fails_it() -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
        remote = remote_of(source, sending)
        receiving[0].claim("d", remote)
        time.sleep(0.1)
        sending[1].close()
        time.sleep(0.1)
        assert receiving[0].take_results() == (set(), set())  # vLLM doesn't wait for it yet
        receiving[0].fetch("d", remote, [3], 0)
        assert not result(receiving[0])


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_peer_that_says_nothing_or_rubbish_fails_the_transfer(is_silent: bool) -> None:
    _, target = one_pair()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                peer, _ = server.accept()
                if not is_silent:
                    peer.sendall(b"GET / HTTP/1.1\r\n" * 8)
                time.sleep(1.0)
                peer.close()

        threading.Thread(target=answer, daemon=True).start()
        with receivers(target, stall_timeout_s=0.3) as receiving:
            remote = RemoteBlocks(
                remote_sequence=0,
                remote_num_tokens=1,
                remote_block_ids=(3,),
                remote_addresses=(
                    Address(
                        rank=Rank(pp=0, tp=0),
                        host="127.0.0.1",
                        port=server.getsockname()[1],
                        key="k",
                    ),
                ),
            )
            receiving[0].fetch("d", remote, [3], 0)
            assert not result(receiving[0])


GARBAGE = [
    b"",
    b"\0",
    b"\xff" * 64,
    struct.pack("!II", 2, 0) + b"[]",
    struct.pack("!II", 2, 0) + b"{}",
    struct.pack("!II", 9, 0) + b"not json!",
    struct.pack("!II", 26, 0) + b'{"claim": 0, "block_ids": 7}'[:26],
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_rubbish_from_a_client_leaves_the_sender_serving(garbage: bytes) -> None:
    source, target = one_pair()
    with senders(source) as sending, receivers(target) as receiving:
        for sender in sending:
            sender.hold(0, "r")
            with socket.create_connection(("127.0.0.1", sender.port)) as client:
                client.sendall(garbage)
        receiving[0].fetch("d", remote_of(source, sending), [3], 0)
        assert result(receiving[0])
