"""The PushConnector's two halves on vLLM's types; a deployment runs it as a whole."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import RequestStatus

from isochunk.config import ConfigError
from isochunk.pd.transfer.shard import LayoutError
from isochunk.vllm.push.connector import PushConnector, PushHandshake, _settings
from isochunk.vllm.push.scheduler import PushScheduler
from isochunk.vllm.push.worker import PagedCache

BLOCK_SIZE = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_blocks_survive_the_way_through_bytes(dtype: torch.dtype, kernel_blocks: int) -> None:
    shape = (6 * kernel_blocks, 4, BLOCK_SIZE // kernel_blocks, 8)
    source = {"a": torch.randn(shape).to(dtype), "b": torch.randn(shape).to(dtype)}
    target = {name: torch.zeros(shape, dtype=dtype) for name in source}
    reading, writing = PagedCache(source, 6), PagedCache(target, 6)
    for name, tensor in source.items():
        data = reading.read(name, [5, 0, 3], 1, 2)
        assert len(data) == 3 * 2 * reading.head_bytes
        writing.write(name, [1, 2, 4], 1, 2, bytes(data))
        whole = tensor.float().view(6, kernel_blocks, *shape[1:])
        got = target[name].float().view(6, kernel_blocks, *shape[1:])
        assert torch.equal(got[[1, 2, 4], :, 1:3], whole[[5, 0, 3], :, 1:3])
        assert not got[[0, 3, 5]].any()
        assert not got[:, :, [0, 3]].any()


@pytest.mark.parametrize(
    "layers",
    [
        {"a": [torch.zeros(2, 2)]},  # a state-space layer: several tensors
        {"a": torch.zeros(4, 2, 16, 8), "b": torch.zeros(4, 1, 16, 8)},
        {"a": torch.zeros(4, 16, 8)},
    ],
)
def test_a_cache_of_another_kind_is_refused(layers: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="one attention cache"):
        PagedCache(layers, 4)


def test_the_factory_finds_the_connector_by_its_path() -> None:
    config = SimpleNamespace(
        kv_connector="PushConnector", kv_connector_module_path="isochunk.vllm.push.connector"
    )
    assert KVConnectorFactory.get_connector_class(config) is PushConnector
    # Everything it overrides exists in this vLLM release.
    for name in vars(PushConnector):
        if not name.startswith("_"):
            assert hasattr(KVConnectorBase_V1, name), name


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"claim_timeout_s": 0}, ["claim_timeout_s=0", "> 0"]),
        ({"stall_timeout_s": float("inf")}, ["stall_timeout_s=inf"]),
        ({"hots": "::1"}, ["hots='::1'", "host, claim_timeout_s, queue_timeout_s"]),
    ],
)
def test_bad_settings_are_named(extra: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        _settings(extra)
    for part in parts:
        assert part in str(caught.value)


# -- scheduler side ------------------------------------------------------------------------


def make_request(params: Any, num_tokens: int = 50, **change: Any) -> Any:
    return SimpleNamespace(
        **{
            "request_id": "d",
            "kv_transfer_params": params,
            "num_prompt_tokens": num_tokens,
            "status": RequestStatus.FINISHED_LENGTH_CAPPED,
        }
        | change
    )


def handed_over() -> Any:
    """Parameters of a finished 50-token prefill on two stages."""
    scheduler = PushScheduler(BLOCK_SIZE)
    scheduler.set_places({(s, 0): PushHandshake("127.0.0.1", 7000 + s, b"s") for s in (0, 1)})
    is_held, params = scheduler.on_finished(
        make_request({"do_remote_decode": True}, request_id="p"), [4, 5, 6, 7]
    )
    assert is_held
    assert scheduler.take_metadata(False).holds == [(params["remote_sequence"], "p")]
    assert params["remote_block_ids"] == (4, 5, 6, 7)
    return params


def blocks_of(ids: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (ids,))


@pytest.mark.parametrize(("num_cached", "first_block"), [(0, 0), (16, 1), (48, 3)])
def test_a_decode_request_fetches_what_its_prefix_cache_lacks(
    num_cached: int, first_block: int
) -> None:
    params = handed_over()
    scheduler = PushScheduler(BLOCK_SIZE)
    request = make_request(params)
    scheduler.on_new_request(request)
    assert "d" in scheduler.take_metadata(True).claims
    for _ in range(2):  # free of side effects: vLLM asks again while blocks are short
        assert scheduler.count_remote_tokens(request, num_cached) == (50 - num_cached, True)
    scheduler.on_allocated(request, blocks_of([10, 11, 12, 13, 14]), 50 - num_cached)
    remote, block_ids, first = scheduler.take_metadata(True).fetches["d"]
    assert (block_ids, first) == ([10, 11, 12, 13][first_block:], first_block)
    assert [address.port for address in remote.remote_addresses] == [7000, 7001]
    # Preempted later: computed here, the blocks are gone.
    assert scheduler.count_remote_tokens(request, 0) == (0, False)


def test_a_full_local_hit_and_an_early_abort_release_the_blocks() -> None:
    params = handed_over()
    scheduler = PushScheduler(BLOCK_SIZE)
    scheduler.on_new_request(make_request(params))
    assert scheduler.count_remote_tokens(make_request(params), 50) == (0, False)
    scheduler.on_allocated(make_request(params), blocks_of([1, 2, 3, 4]), 0)
    assert "d" in scheduler.take_metadata(False).releases
    scheduler.on_new_request(make_request(params))
    aborted = make_request(params, status=RequestStatus.FINISHED_ABORTED)
    assert scheduler.on_finished(aborted, []) == (False, None)
    assert "d" in scheduler.take_metadata(False).releases


def test_a_request_for_the_other_role_is_served_without_a_transfer() -> None:
    producer = PushScheduler(BLOCK_SIZE, is_consumer=False)
    producer.on_new_request(make_request(handed_over()))
    assert producer.count_remote_tokens(make_request(handed_over()), 0) == (0, False)
    consumer = PushScheduler(BLOCK_SIZE, is_producer=False)
    finished = make_request({"do_remote_decode": True})
    assert consumer.on_finished(finished, [1]) == (False, None)
    for scheduler in (producer, consumer):
        news = scheduler.take_metadata(True)
        assert (news.claims, news.releases, news.holds) == ({}, {}, [])


def test_a_request_that_vllm_only_adds_to_let_the_blocks_go_releases_them() -> None:
    params = handed_over()
    scheduler = PushScheduler(BLOCK_SIZE)
    scheduler.on_new_request(make_request(params, num_tokens=1, abort_immediately=True))
    assert "d" in scheduler.take_metadata(False).releases


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"remote_sequence": None}, "remote_sequence"),
        ({"remote_addresses": []}, "remote_addresses"),
        (
            {
                "remote_addresses": [
                    {"rank": {"pp": 0, "tp": 0}, "host": "h", "port": 0, "key": "k"}
                ]
            },
            "port",
        ),
        ({"remote_num_tokens": 49}, "49 tokens"),
        ({"remote_num_tokens": "many"}, "remote_num_tokens"),
    ],
)
def test_parameters_that_make_no_sense_mean_a_local_prefill(
    change: dict[str, Any], part: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = PushScheduler(BLOCK_SIZE)
    request = make_request(handed_over() | change)
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, "vllm.isochunk.push"):
        scheduler.on_new_request(request)
    assert part in caplog.text
    assert scheduler.count_remote_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(
    "change",
    [
        {"status": RequestStatus.FINISHED_ABORTED},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"do_remote_decode": False}},
    ],
)
def test_only_a_finished_prefill_for_a_decode_instance_is_held(change: dict[str, Any]) -> None:
    scheduler = PushScheduler(BLOCK_SIZE)
    request = make_request({"do_remote_decode": True}, **change)
    assert scheduler.on_finished(request, [1]) == (False, None)
    assert not scheduler.take_metadata(False).holds
