"""Who decides: the argument, use_backend, the environment, auto; and what a typing mistake in any of them says."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings

import pytest

from engram_core.errors import BackendUnavailableError, EngramWarning, InvalidArgumentError, UnknownBackendError
from engram_core.registry import State, choose, get_backend, list_backends, survey, use_backend


@pytest.fixture
def three(site):
    site.backend("acme", priority=1)
    site.backend("best", priority=9)
    site.backend("zeta", priority=5)
    return site


def chosen() -> tuple[str, str]:
    decision = choose()
    return decision.name, decision.source


def test_precedence(three, monkeypatch):
    assert chosen() == ("best", "auto")
    monkeypatch.setenv("ENGRAM_BACKEND", "acme")
    assert chosen() == ("acme", "ENGRAM_BACKEND")
    with use_backend("zeta"):
        assert chosen() == ("zeta", "use_backend")
        assert choose("best").source == "argument"
        with use_backend("auto"):
            assert chosen() == ("best", "auto")
        assert chosen() == ("zeta", "use_backend")
    assert chosen() == ("acme", "ENGRAM_BACKEND")
    assert choose("auto").name == "best"


def test_why_names_who_asked(three, monkeypatch):
    assert choose().why == "of highest priority (9) among the available backends for cpu"
    monkeypatch.setenv("ENGRAM_BACKEND", "acme")
    assert choose().why == "asked for by ENGRAM_BACKEND=acme"
    with use_backend("zeta"):
        assert choose().why == "asked for by use_backend"
    assert choose("zeta").why == "asked for by the argument"


@pytest.mark.parametrize("value", ["ACME", "  acme ", "Acme\n"])
def test_names_are_stripped_and_case_folded(three, monkeypatch, value):
    monkeypatch.setenv("ENGRAM_BACKEND", value)
    assert chosen() == ("acme", "ENGRAM_BACKEND")
    monkeypatch.setenv("ENGRAM_BACKEND", "zeta")
    assert choose(value).name == "acme"
    with use_backend(value):
        assert chosen() == ("acme", "use_backend")


def test_an_entry_point_in_upper_case(site):
    site.backend("acme", entry="ACME")
    assert get_backend("acme").info.name == "acme"


@pytest.mark.parametrize("value", ["", "   ", "auto", " AUTO "])
def test_an_empty_variable_is_unset_and_auto_is_allowed(three, monkeypatch, value):
    monkeypatch.setenv("ENGRAM_BACKEND", value)
    assert chosen() == ("best", "auto")


def test_a_variable_changed_after_first_use_takes_effect(three, monkeypatch):
    monkeypatch.setenv("ENGRAM_BACKEND", "acme")
    assert get_backend().info.name == "acme"
    monkeypatch.setenv("ENGRAM_BACKEND", "zeta")
    assert get_backend().info.name == "zeta"
    monkeypatch.delenv("ENGRAM_BACKEND")
    assert get_backend().info.name == "best"


def test_only_the_one_asked_for_is_imported(three):
    decision = choose("acme")
    assert [(d.name, d.state) for d in decision.report.decisions] == [
        ("acme", State.AVAILABLE),
        ("best", State.NOT_LOADED),
        ("zeta", State.NOT_LOADED),
    ]
    assert "fake_best" not in sys.modules


def test_the_same_backend_and_device_give_the_same_object(three):
    assert get_backend("acme") is get_backend("acme", "cpu") is get_backend("ACME", "cpu:0")
    assert get_backend("acme") is not get_backend("zeta")


def test_an_unknown_name_asks_did_you_mean(three, monkeypatch):
    monkeypatch.setenv("ENGRAM_BACKEND", "zetta")
    with pytest.raises(UnknownBackendError, match=r"ENGRAM_BACKEND=zetta: .*did you mean 'zeta'\?") as caught:
        get_backend()
    assert [d.name for d in caught.value.report.decisions] == ["acme", "best", "zeta"]
    with pytest.raises(UnknownBackendError, match="installed are acme, best, zeta"):
        get_backend("quux")


def test_nothing_installed_says_how_to_install(site):
    with pytest.raises(UnknownBackendError, match=r"group engram_core\.backends"):
        get_backend("reference")
    with pytest.raises(BackendUnavailableError, match=r"auto: no backend can run here\.(.|\n)*no backend is installed"):
        get_backend()
    assert list_backends() == []


@pytest.mark.parametrize("name", [7, b"acme", ["acme"]])
def test_a_name_that_is_no_string(three, name):
    with pytest.raises(InvalidArgumentError, match=r"name: got .*; need a backend's name"):
        get_backend(name)
    with pytest.raises(InvalidArgumentError, match=r"name: got .*; need a backend's name"), use_backend(name):
        pass


def test_use_backend_is_undone_by_an_exception(three):
    with pytest.raises(KeyError), use_backend("acme"):
        raise KeyError
    assert chosen() == ("best", "auto")


def test_use_backend_is_not_seen_by_other_threads(three):
    seen = []
    with use_backend("acme"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == [("best", "auto")]


def test_use_backend_is_not_seen_by_other_tasks(three):
    async def main() -> list[str]:
        both_inside = asyncio.Barrier(2)

        async def task(name: str) -> str:
            with use_backend(name):
                await both_inside.wait()
                return choose().name

        return await asyncio.gather(task("acme"), task("zeta"))

    assert asyncio.run(main()) == ["acme", "zeta"]


def test_a_blocked_backend_is_not_imported_and_not_chosen(three, monkeypatch):
    three.module("fake_best", "raise AssertionError('imported')")
    monkeypatch.setenv("ENGRAM_DISABLE_BACKENDS", " BEST ,acme,")
    assert chosen() == ("zeta", "auto")
    assert [d.state for d in list_backends()] == [State.BLOCKED, State.BLOCKED, State.AVAILABLE]
    with pytest.raises(BackendUnavailableError, match="blocked by ENGRAM_DISABLE_BACKENDS=acme,best") as caught:
        get_backend("best")
    assert "fix: take 'best' out of ENGRAM_DISABLE_BACKENDS" in str(caught.value)
    assert "fake_best" not in sys.modules


def test_an_unknown_blocked_name_warns_once(three, monkeypatch):
    monkeypatch.setenv("ENGRAM_DISABLE_BACKENDS", "zetta")
    with pytest.warns(
        EngramWarning, match="blocks 'zetta', and no backend of that name is installed; did you mean 'zeta'"
    ):
        choose()
    choose()


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("ENGRAM_BAKCEND", "did you mean 'ENGRAM_BACKEND'?"),
        ("engram_backend", "did you mean 'ENGRAM_BACKEND'?"),
        ("ENGRAM_DISABLE_BACKEND", "did you mean 'ENGRAM_DISABLE_BACKENDS'?"),
        ("ENGRAM_QQ", "known are ENGRAM_BACKEND, ENGRAM_DISABLE_BACKENDS"),
    ],
)
def test_an_unknown_variable_warns_once(three, monkeypatch, variable, hint):
    monkeypatch.setenv(variable, "acme")
    with pytest.warns(EngramWarning) as caught:
        assert chosen() == ("best", "auto")
    (warning,) = caught
    assert str(warning.message).startswith(f"{variable} is not a variable of engram-core and has no effect")
    assert hint in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose()


def test_survey_tells_without_raising(three, monkeypatch):
    report = survey()
    assert (report.chosen, report.why.partition(":")[0]) == ("best", "best on cpu")
    assert [d.chosen for d in report.decisions] == [False, True, False]
    monkeypatch.setenv("ENGRAM_BACKEND", "zetta")
    report = survey()
    assert report.chosen is None
    assert "did you mean 'zeta'?" in report.why
    assert [d.state for d in report.decisions] == [State.AVAILABLE] * 3
