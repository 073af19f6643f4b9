"""Every way in which a plugin can be bad: its row says why, its neighbours run, and asking for it by name raises."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from engram_core.errors import (
    BackendConflictError,
    BackendIncompatibleError,
    BackendLoadError,
    BackendUnavailableError,
)
from engram_core.registry import State, get_backend, list_backends

MISSPELT = """
from engram_core.hookspecs import hookimpl
@hookimpl
def engram_backends(): ...
"""
SIGNATURE = """
from engram_core.hookspecs import hookimpl
@hookimpl
def engram_backend(device): ...
"""
UNMARKED = "def engram_backend(): ..."
RAISING = """
from engram_core.hookspecs import hookimpl
@hookimpl
def engram_backend(): raise KeyError("ACME_HOME")
"""
RETURNS_DICT = """
from engram_core.hookspecs import hookimpl
@hookimpl
def engram_backend(): return {"name": "acme"}
"""
RETURNS_NONE = RETURNS_DICT.replace('{"name": "acme"}', "None")

# id, what is installed, state, code of the reason, words of the cause, words of the fix
FAULTS: list[tuple[str, dict[str, Any], State, str, str, str]] = [
    (
        "import error",
        {"plugin": "raise ImportError('libacme.so.1: undefined symbol _ZN4flex')"},
        State.BROKEN,
        "import-failed",
        "ImportError: libacme.so.1: undefined symbol _ZN4flex (importing fake_acme)",
        "ENGRAM_DISABLE_BACKENDS=acme",
    ),
    (
        "missing module",
        {"plugin": "import acme_runtime_that_is_absent"},
        State.BROKEN,
        "import-failed",
        "ModuleNotFoundError: No module named 'acme_runtime_that_is_absent'",
        "repair or upgrade acme-engram",
    ),
    ("syntax error", {"plugin": "def f(:"}, State.BROKEN, "import-failed", "SyntaxError: ", "repair"),
    ("exit at import", {"plugin": "raise SystemExit(3)"}, State.BROKEN, "import-failed", "SystemExit: 3", "repair"),
    ("misspelt hook", {"plugin": MISSPELT}, State.BROKEN, "bad-hook", "unknown hook 'engram_backends'", "repair"),
    ("wrong signature", {"plugin": SIGNATURE}, State.BROKEN, "bad-hook", "{'device'}", "repair"),
    ("unmarked hook", {"plugin": UNMARKED}, State.BROKEN, "no-hook", "marked with engram_core.hookimpl", "repair"),
    ("hook raises", {"plugin": RAISING}, State.BROKEN, "hook-failed", "KeyError: 'ACME_HOME'", "repair"),
    ("hook returns a dict", {"plugin": RETURNS_DICT}, State.BROKEN, "bad-info", "{'name': 'acme'}", "repair"),
    ("hook returns None", {"plugin": RETURNS_NONE}, State.BROKEN, "bad-info", "returned None", "repair"),
    (
        "malformed info",
        {"priority": "high"},
        State.BROKEN,
        "import-failed",
        "BackendInfo.priority is 'high'; an int is needed",
        "repair",
    ),
    (
        "another name than the entry point's",
        {"info_name": "acne"},
        State.BROKEN,
        "name-mismatch",
        "BackendInfo.name is 'acne', and the entry point is named 'acme'",
        "repair",
    ),
    (
        "interface of the next major",
        {"api": (2, 0)},
        State.INCOMPATIBLE,
        "api-version",
        "acme-engram is written for interface 2.0; this engram-core has interface 1.0",
        "upgrade engram-core to a release with interface 2.0",
    ),
    ("interface of the next minor", {"api": (1, 1)}, State.INCOMPATIBLE, "api-version", "interface 1.1", "1.1"),
    (
        "interface of an earlier major",
        {"api": (0, 9)},
        State.INCOMPATIBLE,
        "api-version",
        "interface 0.9",
        "upgrade acme-engram to a release for interface 1.0",
    ),
    (
        "probe raises",
        {"extra": "\ndef probe(): raise OSError('smi: no such tool')"},
        State.BROKEN,
        "probe-failed",
        "OSError: smi: no such tool (calling the probe fake_acme:probe)",
        "repair",
    ),
    ("probe returns None", {"extra": "\ndef probe(): ..."}, State.BROKEN, "bad-probe", "returned None", "repair"),
    ("no such probe", {"probe": "fake_acme:prob"}, State.BROKEN, "probe-failed", "AttributeError: ", "repair"),
    (
        "unavailable",
        {"extra": "\ndef probe(): return (Reason('sdk', 'SDK 3 found; SDK 4 is needed', 'acme-up 4'),)"},
        State.UNAVAILABLE,
        "sdk",
        "SDK 3 found; SDK 4 is needed",
        "acme-up 4",
    ),
]

RAISED = {
    State.BROKEN: BackendLoadError,
    State.INCOMPATIBLE: BackendIncompatibleError,
    State.UNAVAILABLE: BackendUnavailableError,
}


def squeezed(text: object) -> str:
    """Without the table's wrapping."""
    return " ".join(str(text).split())


@pytest.mark.parametrize(
    ("installed", "state", "code", "cause", "fix"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_bad_plugin_is_named_and_its_neighbour_runs(site, installed, state, code, cause, fix):
    site.backend("acme", **installed)
    site.backend("zeta")
    acme, zeta = list_backends()
    assert (acme.name, acme.state, acme.distribution, acme.version) == ("acme", state, "acme-engram", "0.2")
    assert acme.reasons[0].code == code
    assert cause in squeezed(acme.reasons[0].message)
    assert fix in acme.reasons[0].fix
    assert (zeta.name, zeta.state, zeta.chosen) == ("zeta", State.AVAILABLE, True)

    assert get_backend().info.name == "zeta"
    with pytest.raises(RAISED[state]) as caught:
        get_backend("acme")
    assert cause in squeezed(caught.value)
    assert fix in squeezed(caught.value)
    # Asked for by name only acme was loaded, and yet the table shows what else could run.
    assert [(d.name, d.state) for d in caught.value.report.decisions] == [("acme", state), ("zeta", State.AVAILABLE)]


def test_all_reasons_are_shown_not_only_the_first(site):
    site.backend(
        "acme", extra="\ndef probe(): return Reason('a', 'no card', 'buy one'), Reason('b', 'no SDK', 'get one')"
    )
    with pytest.raises(BackendUnavailableError) as caught:
        get_backend("acme")
    assert [reason.code for reason in caught.value.reasons] == ["a", "b"]
    for words in ("no card", "fix: buy one", "no SDK", "fix: get one"):
        assert words in str(caught.value)


def test_the_cause_is_chained(site):
    site.backend("acme", plugin="import acme_runtime_that_is_absent")
    with pytest.raises(BackendLoadError) as caught:
        get_backend("acme")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_entry_point_to_a_missing_module(site):
    site.dist("acme-engram", "0.2", "acme = acme_engram_gone.plugin")
    with pytest.raises(BackendLoadError, match="No module named 'acme_engram_gone'"):
        get_backend("acme")


def test_an_entry_point_to_an_object(site):
    module = site.backend("zeta")
    site.module("fake_holder", f"import {module} as mod\nclass Holder:\n    plugin = mod\n")
    site.dist("acme-engram", "0.2", "zeta = fake_holder:Holder.plugin")
    (site.root / "zeta_engram-0.2.dist-info" / "entry_points.txt").unlink()
    assert get_backend("zeta").info.name == "zeta"


def test_two_distributions_of_one_name_are_both_named_and_neither_is_imported(site):
    site.module("fake_one", "raise AssertionError('imported')")
    site.dist("acme-engram", "0.2", "acme = fake_one")
    site.dist("acme-fork", "1.7", "Acme = fake_one")
    site.backend("zeta")
    assert [(d.name, d.state) for d in list_backends()] == [
        ("acme", State.CONFLICT),
        ("acme", State.CONFLICT),
        ("zeta", State.AVAILABLE),
    ]
    with pytest.raises(BackendConflictError) as caught:
        get_backend("acme")
    for words in ("acme-engram 0.2", "acme-fork 1.7", "pip uninstall acme-engram or pip uninstall acme-fork"):
        assert words in squeezed(caught.value)
    assert "fake_one" not in sys.modules
    assert get_backend().info.name == "zeta"


def test_the_same_distribution_seen_twice_is_one(site):
    site.backend("acme")
    site.dist("Acme_Engram", "0.2", "acme=fake_acme", folder="checkout")
    assert [(d.name, d.state) for d in list_backends()] == [("acme", State.AVAILABLE)]


def test_a_malformed_entry_points_file_hides_nobody(site):
    site.dist("acme-engram", "0.2", "acme fake_acme")
    site.backend("zeta")
    acme, zeta = list_backends()
    assert (acme.name, acme.state, acme.reasons[0].code) == ("acme-engram", State.BROKEN, "bad-entry-point")
    assert zeta.state is State.AVAILABLE


def test_a_distribution_without_metadata_is_told_by_its_place(site):
    site.backend("acme")
    (site.root / "acme_engram-0.2.dist-info" / "METADATA").unlink()
    (acme,) = list_backends()
    assert acme.state is State.AVAILABLE
    assert str(site.root) in acme.distribution


CONSTRUCTION: list[tuple[str, str, str]] = [
    (
        "raises",
        "def __init__(self, device): raise RuntimeError('no handle for ' + str(device))",
        "RuntimeError: no handle for cpu (creating fake_acme_backend:Backend on cpu)",
    ),
    ("leaves a method out", "post_wkv = EngramBackend.post_wkv", "abstract method post_wkv"),
    ("other info", "info = None", "fake_acme_backend:Backend.info is not the BackendInfo"),
]


@pytest.mark.parametrize(("body", "cause"), [c[1:] for c in CONSTRUCTION], ids=[c[0] for c in CONSTRUCTION])
def test_a_factory_that_fails(site, body, cause):
    site.backend("acme", body=body)
    with pytest.raises(BackendLoadError) as caught:
        get_backend("acme")
    assert cause in squeezed(caught.value)
    assert "fix: repair or upgrade acme-engram" in squeezed(caught.value)
    assert caught.value.report.decisions[0].state is State.BROKEN


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("Backend = object", "a subclass of engram_core.EngramBackend is needed"),
        ("import acme_sdk_that_is_absent", "No module named 'acme_sdk_that_is_absent' (loading the factory"),
        ("Other = 1", "has no attribute 'Backend'"),
    ],
)
def test_a_factory_that_is_none(site, source, cause):
    site.backend("acme", backend=source)
    with pytest.raises(BackendLoadError) as caught:
        get_backend()
    assert "auto chose 'acme', which is broken" in str(caught.value)
    assert cause in squeezed(caught.value)


def test_a_factory_may_refuse_with_reasons_of_its_own(site):
    body = (
        "def __init__(self, device):\n"
        "        from engram_core.errors import BackendUnavailableError\n"
        "        from engram_core.info import Reason\n"
        "        raise BackendUnavailableError('card is in use', reasons=(Reason('busy', 'held by pid 7', 'kill 7'),))"
    )
    site.backend("acme", body=body)
    site.core()
    with pytest.raises(BackendUnavailableError, match="card is in use") as caught:
        get_backend("acme")
    first = caught.value.report.decisions[0]
    assert (first.name, first.state, first.reasons[0].code) == ("acme", State.UNAVAILABLE, "busy")
    assert "fix: kill 7" in str(caught.value)
    assert "To run the slow reference on purpose: ENGRAM_BACKEND=reference." in str(caught.value)
