"""The cases are data that fits: every one is executed by a function, and no function is without cases."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from engram_conformance import expectations
from engram_conformance.cases import ALL, Case, Size, Tolerance
from engram_conformance.cases.geometry import GEOMETRIES
from engram_conformance.cases.model import unique

from engram_core.info import API_VERSION, Capability

AREAS = ("hash", "rows", "wkv", "gate", "step", "ahead", "graphs", "streams", "refusals", "parallel", "lifecycle")


def _functions() -> dict[tuple[str, str], Callable[..., None]]:
    found = {}
    for area in AREAS:
        module = importlib.import_module(f"engram_conformance.suite.test_{area}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_"):
                found[area, name.removeprefix("test_")] = function
    return found


def test_cases_and_functions_belong_together() -> None:
    assert {(case.area, case.check) for case in ALL} == set(_functions())


def test_every_capability_has_a_case() -> None:
    asked = {capability for case in ALL for capability in case.needs}
    assert asked == set(Capability)


def test_cases_are_well_formed() -> None:
    for case in ALL:
        assert case.geometry in GEOMETRIES, case.id
        assert case.says.endswith("."), case.id
        assert case.since <= API_VERSION, case.id
        assert isinstance(case.size, Size), case.id
        assert isinstance(case.tolerance, Tolerance), case.id
        with pytest.raises(TypeError):
            case.params["x"] = 1  # type: ignore[index]


def test_core_cases_need_nothing_that_can_be_declared_away() -> None:
    core = {Capability.HASH, Capability.ROWS, Capability.GATE, Capability.WKV_MXFP8}
    for case in ALL:
        if case.core:
            assert case.needs <= core, case.id


def test_ids_are_unique_and_stable_words() -> None:
    assert len({case.id for case in ALL}) == len(ALL)
    assert len({case.seed for case in ALL}) == len(ALL)
    with pytest.raises(ValueError, match="two cases are named"):
        unique([ALL[0], ALL[0]])


def test_what_the_issue_asks_for_is_there() -> None:
    ids = {case.id for case in ALL}
    for tokens in (0, 1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 33, 64, 127, 128, 129, 255):
        assert {f"wkv-tokens-{tokens}", f"wkv-real-tokens-{tokens}"} <= ids
    for dim in (4, 48, 96, 1000, 5120):
        assert {f"gate-random-dim-{dim}-copies-{copies}" for copies in (1, 2, 4, 8)} <= ids
    assert {f"parallel-tensor-{ranks}" for ranks in (1, 2, 3, 4, 8)} <= ids
    assert {"parallel-rows-15-over-4", "parallel-rows-9-over-8", "parallel-rows-24-over-7"} <= ids


def test_golden_files_are_the_published_ones() -> None:
    golden = json.loads(files("engram_conformance").joinpath("golden", "hash_deepseek_v41.json").read_text())
    assert golden["meta"]["rows"] == [384_006_168, 384_016_682]
    assert {entry["name"] for entry in golden["cases"]} == {
        case.params["entry"] for case in ALL if case.check == "golden" and "entry" in case.params
    }


OPTIONAL = next(case for case in ALL if not case.core)
CORE = next(case for case in ALL if case.core)


def _read(tmp_path: Path, text: str, interpreted: bool = False) -> dict[str, str]:
    path = tmp_path / expectations.FILE
    path.write_text(text, encoding="utf-8")
    cases: dict[str, Case] = {case.id: case for case in ALL}
    return expectations.read(path, cases, interpreted=interpreted, device_type="cpu")


def test_expectations_are_read(tmp_path: Path) -> None:
    entry = f'version = 1\n[[expected_failure]]\ncase = "{OPTIONAL.id}"\nreason = "known"\n'
    assert _read(tmp_path, entry) == {OPTIONAL.id: "known"}
    assert _read(tmp_path, entry + "interpreted = true\n") == {}
    assert _read(tmp_path, entry + "interpreted = true\n", interpreted=True) == {OPTIONAL.id: "known"}
    assert _read(tmp_path, entry + 'device_type = "cuda"\n') == {}
    assert expectations.read(None, {}, interpreted=False, device_type="cpu") == {}
    assert expectations.find("no such backend") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'version = 1\n[[expected_failure]]\ncase = "{CORE.id}"\nreason = "x"', "core case"),
        ('version = 1\n[[expected_failure]]\ncase = "wkv-*"\nreason = "x"', "no case is named"),
        (f'version = 1\n[[expected_failure]]\ncase = "{OPTIONAL.id}"', "reason is None"),
        (f'version = 1\n[[expected_failure]]\ncase = "{OPTIONAL.id}"\nreason = " "', "reason is ' '"),
        (f'version = 1\n[[expected_failure]]\ncase = "{OPTIONAL.id}"\nreason = "x"\nwhen = 1', "keys"),
        (f'[[expected_failure]]\ncase = "{OPTIONAL.id}"\nreason = "x"', "version = 1"),
        ("version = 1\nskip = []", "version = 1"),
        ("version = ", "expectations.toml"),
    ],
)
def test_expectations_that_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(expectations.ExpectationsError, match=says.replace("*", r"\*")):
        _read(tmp_path, text)
