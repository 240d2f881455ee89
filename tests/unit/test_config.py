import argparse
import math

import pytest

from isochunk.config import SMOOTH_FACTOR_ENV, ConfigError, DynamicChunkingConfig, resolve_config
from isochunk.flags import add_flags, resolve_flags


def ascend(**settings: object) -> dict:
    return {"scheduler_config": {"profiling_chunk_config": {"enabled": True, **settings}}}


def test_off_by_default() -> None:
    assert not resolve_config(None, {}).enabled
    assert not resolve_config({"something": 1}, {}).enabled


def test_own_spelling_and_defaults() -> None:
    config = resolve_config({"isochunk": {"enabled": True, "smooth_factor": 0.6}}, {})
    assert config == DynamicChunkingConfig(
        enabled=True, policy="equal-latency", smooth_factor=0.6, min_chunk_size=4096
    )


@pytest.mark.parametrize(
    ("section", "env", "policy"),
    [
        ({}, {}, "auto"),
        ({"max_calibration_samples": 40}, {}, "auto"),
        ({"smooth_factor": 0.7}, {}, "equal-latency"),
        ({"min_chunk_size": 512}, {}, "equal-latency"),
        ({}, {SMOOTH_FACTOR_ENV: "0.7"}, "equal-latency"),
        ({"smooth_factor": 0.7, "policy": "auto"}, {}, "auto"),
        ({"policy": "fixed"}, {}, "fixed"),
    ],
)
def test_settings_of_the_equal_latency_rule_choose_it(
    section: dict, env: dict, policy: str
) -> None:
    assert resolve_config({"isochunk": {"enabled": True, **section}}, env).policy == policy


def test_unknown_policy_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"policy='best'.*auto, equal-latency or fixed"):
        resolve_config({"isochunk": {"enabled": True, "policy": "best"}}, {})


@pytest.mark.parametrize("nested", [True, False])
def test_ascend_spelling_means_the_same(nested: bool) -> None:
    section = {
        "enabled": True,
        "smooth_factor": 0.8,
        "min_chunk": 2048,
        "need_timing": False,
        "max_fit_chunk": 40,
    }
    additional = {"profiling_chunk_config": section}
    config = resolve_config({"scheduler_config": additional} if nested else additional, {})
    assert config == DynamicChunkingConfig(
        enabled=True,
        policy="equal-latency",
        smooth_factor=0.8,
        min_chunk_size=2048,
        runtime_calibration=False,
        max_calibration_samples=40,
    )


def test_ascend_default_smoothing_is_theirs() -> None:
    assert resolve_config(ascend(), {}).smooth_factor == 1.0
    assert resolve_config(ascend(), {SMOOTH_FACTOR_ENV: "0.7"}).smooth_factor == 0.7


def test_precedence_own_over_ascend_over_environment() -> None:
    env = {SMOOTH_FACTOR_ENV: "0.1"}
    assert resolve_config({"isochunk": {"enabled": True}}, env).smooth_factor == 0.1
    both = ascend(smooth_factor=0.2) | {"isochunk": {"smooth_factor": 0.3}}
    assert resolve_config(ascend(smooth_factor=0.2), env).smooth_factor == 0.2
    assert resolve_config(both, env).smooth_factor == 0.3


def test_feature_off_starts_whatever_else_is_wrong() -> None:
    env = {SMOOTH_FACTOR_ENV: "1.5"}
    assert not resolve_config({}, env).enabled
    assert not resolve_config({"isochunk": {"enabled": False, "smooth_factor": 9}}, env).enabled


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "inf", "abc", ""])
def test_bad_environment_names_variable_value_and_range(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_config({"isochunk": {"enabled": True}}, {SMOOTH_FACTOR_ENV: value})
    assert SMOOTH_FACTOR_ENV in str(error.value)
    assert repr(value) in str(error.value)
    assert "[0, 1]" in str(error.value)


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"smooth_factor": 1.5}, ["smooth_factor=1.5", "[0, 1]"]),
        ({"smooth_factor": math.nan}, ["smooth_factor=nan", "[0, 1]"]),
        ({"min_chunk": 0}, ["min_chunk=0", "> 0"]),
        ({"min_chunk": "many"}, ["min_chunk='many'", "> 0"]),
        ({"max_fit_chunk": 5}, ["max_fit_chunk=5", "> 5"]),
        ({"min_chunks": 5}, ["min_chunks=5", "min_chunk, need_timing"]),
        ({"smooth_factor": 2, "min_chunk": -1}, ["smooth_factor=2", "min_chunk=-1"]),
        ({"min_chunk_size": 64}, ["profiling_chunk_config.min_chunk_size=64", "not a setting"]),
    ],
)
def test_bad_ascend_setting_is_named_as_written(section: dict, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_config(ascend(**section), {})
    for part in ["scheduler_config.profiling_chunk_config", *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize("section", ["yes", 1, [], True])
def test_section_of_another_type(section: object) -> None:
    with pytest.raises(ConfigError, match="expected an object"):
        resolve_config({"profiling_chunk_config": section}, {})


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(argv)


def test_flags_become_additional_config_and_keep_the_rest() -> None:
    args = parse("--enable-dynamic-chunking", "--dynamic-chunking-min-chunk-size", "512")
    settings, additional = resolve_flags(args, {"other": 1}, {SMOOTH_FACTOR_ENV: "0.9"})
    assert settings.min_chunk_size == 512
    assert additional["other"] == 1
    # The engine process sees what was resolved here, without this environment.
    assert resolve_config(additional, {}) == settings
    assert settings.smooth_factor == 0.9


def test_flags_name_themselves_in_errors() -> None:
    args = parse("--enable-dynamic-chunking", "--dynamic-chunking-smooth-factor", "1.5")
    with pytest.raises(ConfigError, match=r"--dynamic-chunking-smooth-factor='1.5'.*\[0, 1\]"):
        resolve_flags(args, None, {})


def test_without_the_flag_nothing_is_enabled() -> None:
    args = parse("--dynamic-chunking-smooth-factor", "7")
    settings, _ = resolve_flags(args, None, {})
    assert not settings.enabled


def test_ascend_command_line_enables_without_our_flag() -> None:
    settings, additional = resolve_flags(parse(), ascend(min_chunk=1024), {})
    assert settings.enabled
    assert resolve_config(additional, {}) == settings


@pytest.mark.parametrize("off", [False, 0, "false", "off", "no"])
def test_every_spelling_of_off_starts(off: object) -> None:
    env = {SMOOTH_FACTOR_ENV: "1.5"}
    section = {"enabled": off, "smooth_factor": 9, "unknown": 1}
    assert not resolve_config({"isochunk": section}, env).enabled
    assert not resolve_config({"profiling_chunk_config": section}, env).enabled
    assert not resolve_config({"profiling_chunk_config": False}, env).enabled


def test_disabled_ascend_section_does_not_choose_the_policy() -> None:
    both = {"isochunk": {"enabled": True}, "profiling_chunk_config": {"enabled": False}}
    assert resolve_config(both, {}).policy == "auto"


@pytest.mark.parametrize(
    "name", ["smooth_factor", "min_chunk_size", "max_calibration_samples", "max_fit_error"]
)
def test_true_is_not_a_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"isochunk.{name}=True"):
        resolve_config({"isochunk": {"enabled": True, name: True}}, {})


def test_trace_file_needs_an_existing_directory() -> None:
    with pytest.raises(ConfigError, match=r"trace_file='/does/not/exist/x'"):
        resolve_config({"isochunk": {"enabled": True, "trace_file": "/does/not/exist/x"}}, {})
