"""`Config`: validation, and what the environment may say."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice
from allocator.config import ALWAYS, REUSE_KINDS

MIB = 1 << 20


def test_the_defaults() -> None:
    c = Config()
    assert (c.limit, c.backing, c.max_in_flight, c.uses, c.seal_frees, c.detect_captures) == (
        0, "vmm", 0, "auto", 64, False,
    )  # fmt: skip
    assert c.reuse == set(REUSE_KINDS)
    assert c.move_pages and c.release_on_demand and c.wait_on_demand and c.collect_on_demand


def test_a_config_is_frozen_and_compares() -> None:
    c = Config(limit=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.limit = 2  # type: ignore[misc]
    assert c == Config(limit=1) != Config() and hash(c) == hash(Config(limit=1))
    with pytest.raises(TypeError):
        Config(1)  # type: ignore[call-arg]


def test_every_field_is_documented() -> None:
    import inspect

    source = inspect.getsource(Config)
    for f in dataclasses.fields(Config):
        assert re.search(rf'    {f.name}: [^\n]*\n    """', source), f"{f.name} has no text"


def test_the_kinds_of_reuse_that_always_are_need_not_be_named() -> None:
    assert Config(reuse=frozenset()).reuse == ALWAYS
    assert Config(reuse={"opportunistic"}).reuse == ALWAYS | {"opportunistic"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", -1),
        ("max_in_flight", -5),
        ("backing", "managed"),
        ("uses", "maybe"),
        ("reuse", frozenset({"sometimes"})),
        ("reuse", "opportunistic"),
        ("small_page", MIB),
        ("small_page", 3 * MIB),
        ("large_page", 0),
        ("large_page", 2 * MIB + 512),
        ("small_request", 0),
        ("small_request", 4 * MIB),
        ("seal_frees", 0),
        ("seal_bytes", 0),
        ("wait_timeout", -0.1),
        ("wait_timeout", 1e9),
        ("wait_timeout", float("nan")),
    ],
)
def test_a_value_out_of_range_is_one_clear_value_error(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field.split("_")[0]) as caught:
        Config(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", 1.5),
        ("limit", True),
        ("limit", "1GiB"),
        ("seal_frees", None),
        ("wait_timeout", "1"),
        ("wait_timeout", True),
        ("detect_captures", 1.0),
        ("canary", 1),
        ("move_pages", None),
        ("context_events", "yes"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_clear_type_error(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=field) as caught:
        Config(**{field: value})
    assert "\n" not in str(caught.value)


# -- the environment --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("WEIR_LIMIT", "1048576", "limit", MIB),
        ("WEIR_LIMIT", "512MiB", "limit", 512 * MIB),
        ("WEIR_LIMIT", " 2 GiB ", "limit", 2048 * MIB),
        ("WEIR_LIMIT", "1TiB", "limit", 1 << 40),
        ("WEIR_LIMIT", "50%", "limit", 512 * MIB),
        ("WEIR_MAX_IN_FLIGHT", "25%", "max_in_flight", 256 * MIB),
        ("WEIR_SMALL_PAGE", "4MiB", "small_page", 4 * MIB),
        ("WEIR_LARGE_PAGE", "32MiB", "large_page", 32 * MIB),
        ("WEIR_SMALL_REQUEST", "1MiB", "small_request", MIB),
        ("WEIR_SEAL_BYTES", "64MiB", "seal_bytes", 64 * MIB),
        ("WEIR_SEAL_FREES", "7", "seal_frees", 7),
        ("WEIR_WAIT_TIMEOUT", "0.25", "wait_timeout", 0.25),
        ("WEIR_BACKING", "malloc", "backing", "malloc"),
        ("WEIR_USES", "assumed", "uses", "assumed"),
        ("WEIR_DETECT_CAPTURES", "1", "detect_captures", True),
        ("WEIR_MOVE_PAGES", "off", "move_pages", False),
        ("WEIR_WAIT_ON_DEMAND", "No", "wait_on_demand", False),
        ("WEIR_REUSE", "opportunistic, event_dependency", "reuse", ALWAYS | {"opportunistic", "event_dependency"}),
        ("WEIR_REUSE", "", "reuse", ALWAYS),
    ],
)
def test_the_environment_sets_a_field(name: str, text: str, field: str, value: object) -> None:
    assert getattr(Config.from_env({name: text}, device_memory=1024 * MIB), field) == value


def test_every_field_can_be_set_from_the_environment_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="WEIR_LIMITT") as caught:
        Config.from_env({"WEIR_LIMITT": "1"})
    text = str(caught.value)
    assert "\n" not in text
    assert all(f"WEIR_{f.name.upper()}" in text for f in dataclasses.fields(Config))


def test_foreign_names_and_the_autoinstall_switch_are_let_through() -> None:
    assert Config.from_env({"PATH": "x", "weir_limit": "x", "WEIR_AUTOINSTALL": "1"}) == Config()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("WEIR_LIMIT", "much"),
        ("WEIR_LIMIT", "-1"),
        ("WEIR_LIMIT", "1.5GiB"),
        ("WEIR_LIMIT", "10GB"),
        ("WEIR_LIMIT", "101%"),
        ("WEIR_LIMIT", ""),
        ("WEIR_SEAL_FREES", "x"),
        ("WEIR_SEAL_FREES", "1KiB"),
        ("WEIR_WAIT_TIMEOUT", "soon"),
        ("WEIR_DETECT_CAPTURES", "maybe"),
    ],
)
def test_what_cannot_be_read_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        Config.from_env({name: text}, device_memory=1 << 30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("WEIR_BACKING", "heap"), ("WEIR_REUSE", "never"), ("WEIR_SEAL_FREES", "0"), ("WEIR_USES", "")]
)
def test_what_does_not_fit_is_a_value_error_in_one_line(name: str, text: str) -> None:
    with pytest.raises(ValueError, match="WEIR_") as caught:
        Config.from_env({name: text})
    assert "\n" not in str(caught.value)


def test_a_share_of_the_device_needs_a_device() -> None:
    with pytest.raises(ValueError, match="WEIR_LIMIT"):
        Config.from_env({"WEIR_LIMIT": "50%"})


def test_a_pool_without_a_config_reads_the_environment_and_one_with_a_config_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimDevice(memory=1024 * MIB)
    monkeypatch.setenv("WEIR_LIMIT", "50%")
    assert CachingAllocator(gpu).config.limit == 512 * MIB
    assert CachingAllocator(gpu, config=Config()).config.limit == 0
    monkeypatch.setenv("WEIR_NONSENSE", "1")
    with pytest.raises(ValueError, match="WEIR_NONSENSE"):
        CachingAllocator(gpu)
    CachingAllocator(gpu, config=Config())
