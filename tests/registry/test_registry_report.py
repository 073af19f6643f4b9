"""The table of decisions, to the letter, and the same as data."""

from __future__ import annotations

import json
import pickle

import pytest

from engram_core.errors import BackendLoadError, InvalidArgumentError
from engram_core.info import Reason
from engram_core.registry import BackendStatus, Report, State, backend_facts, choose, list_backends, survey

STATUSES = (
    BackendStatus(
        "nvidia",
        State.UNAVAILABLE,
        "engram-core",
        "0.1.0",
        (
            Reason(
                "torch-build",
                "torch 2.13.0+cpu is a CPU build; a CUDA build is needed",
                "pip install torch (a CUDA build), then retry",
            ),
            Reason("no-device", "no GPU"),
        ),
    ),
    BackendStatus(
        "acme", State.BROKEN, "acme-engram", "0.2", (Reason("import-failed", "ImportError: libacme.so.1:\n  gone"),)
    ),
    BackendStatus("reference", State.AVAILABLE, "engram-core", "0.1.0", chosen=True),
)

TABLE = """\
  nvidia     unavailable  engram-core 0.1.0  torch 2.13.0+cpu is a CPU build; a CUDA
                                             build is needed
                                             fix: pip install torch (a CUDA build),
                                                  then retry
                                             no GPU
  acme       broken       acme-engram 0.2    ImportError: libacme.so.1: gone
* reference  available    engram-core 0.1.0
Details: engram-core doctor"""


def test_the_table_is_aligned_and_wrapped():
    assert Report(STATUSES, hint="Details: engram-core doctor").table(width=85) == TABLE


def test_a_long_command_is_never_broken_inside_a_word():
    url = "https://example.org/" + "a" * 200
    assert url in Report((BackendStatus("a", State.BROKEN, "d", "1", (Reason("x", "y", url),)),)).table(width=60)


def test_an_empty_table_says_so():
    assert Report(()).table() == "  (no backend is installed)"


def test_data_survives_json(site):
    site.backend("acme", plugin="raise ImportError('gone')")
    site.core()
    data = json.loads(json.dumps(survey().to_json()))
    assert data["chosen"] == "reference"
    assert data["why"] == "reference on cpu: no accelerator is visible"
    by_name = {row["name"]: row for row in data["backends"]}
    assert set(by_name) == {"acme", "nvidia", "rocm", "reference"}
    assert by_name["acme"]["state"] == "broken"
    assert by_name["acme"]["info"] is None
    assert by_name["acme"]["reasons"][0]["message"] == "ImportError: gone (importing fake_acme)"
    assert by_name["reference"]["chosen"] is True
    assert by_name["reference"]["info"]["api_version"] == [1, 0]
    assert "wkv_mxfp8" in by_name["reference"]["info"]["capabilities"]
    assert json.loads(json.dumps(choose().to_json()))["device"] == "cpu"


def test_an_error_survives_the_way_from_a_worker(site):
    site.backend("acme", plugin="raise ImportError('gone')")
    with pytest.raises(BackendLoadError) as caught:
        choose("acme")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is BackendLoadError
    assert str(again) == str(caught.value)
    wrong = InvalidArgumentError("max_tokens", -1, "a positive int")
    assert str(pickle.loads(pickle.dumps(wrong))) == str(wrong) == "max_tokens: got -1; need a positive int"


def test_facts_for_the_doctor(site):
    site.core()
    site.backend("acme")
    site.backend("zeta", extra="\ndef facts(): raise OSError('no tool')")
    facts = {status.name: backend_facts(status) for status in list_backends()}
    assert facts["acme"] == {}
    assert facts["zeta"] == {"facts": "failed: OSError: no tool"}
    assert {"torch", "CUDA devices", "FlashInfer", "triton", "C compiler", "Python.h"} <= set(facts["nvidia"])
    assert {"torch", "HIP devices", "triton"} <= set(facts["rocm"])
    assert "torch" in facts["reference"]
