"""The call of FlashInfer's MXFP8 product against its real signatures, and the number format against its own oracle.

FlashInfer's wheel is 101 MB and its dependencies bring CUDA: the sources are read from an installed package, or from a
wheel in ``.peers/`` (``pip download --no-deps flashinfer-python==0.7.4 -d .peers``); without either, these are skipped.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engram_nvidia import flashinfer

from engram_core import formats

Read = Callable[[str], str]
PACKAGES = ("flashinfer", "flashinfer.batch_invariant", "flashinfer.batch_invariant.quantization")


@pytest.fixture
def source() -> Read:
    """Reads a file of FlashInfer by its path in the package."""
    wheels = sorted((Path(__file__).parents[2] / ".peers").glob("flashinfer_python-0.7*.whl"))
    try:
        installed = {str(path): path for path in files("flashinfer-python") or ()}
    except PackageNotFoundError:
        installed = {}
    if installed:
        return lambda name: installed[name].read_text()
    if not wheels:
        pytest.skip("no FlashInfer sources here")
    return lambda name: zipfile.ZipFile(wheels[-1]).read(name).decode()


def parameters(text: str, name: str) -> list[str]:
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name]
    return [argument.arg for argument in found[-1].args.args]


def test_mm_mxfp8_takes_what_is_passed(source: Read) -> None:
    text = source("flashinfer/gemm/gemm_base.py")
    assert tuple(parameters(text, "mm_mxfp8"))[: len(flashinfer.PARAMETERS)] == flashinfer.PARAMETERS
    assert f'"{flashinfer.GEMM_BACKEND}": _cute_dsl_gemm_mxfp8_requirement' in text
    checks = text[text.index("def _check_mm_mxfp8_problem_size") :]
    assert f"min_n = {flashinfer.LEAST_N}" in checks
    assert f"min_k = {flashinfer.LEAST_K}" in checks


def test_autotune_takes_what_is_passed(source: Read) -> None:
    assert parameters(source("flashinfer/autotuner/autotuner.py"), "autotune")[0] == "tune_mode"
    assert "autotune" in source("flashinfer/__init__.py")


@pytest.fixture
def oracle(source: Read, tmp_path: Path) -> Iterator[types.ModuleType]:
    """FlashInfer's own pure-torch reference, its parents stubbed: they would load CUDA."""
    folder = "flashinfer/batch_invariant"
    names = (
        "mx_reference",
        "mx_spec",
        "nvfp4_reference",
        "nvfp4_spec",
        "nvfp4_schedule",
        "mx_schedule",
        "layout",
        "qterm",
        "cvt_fp8",
        "blocks",
        "classes",
    )
    wanted = [f"quantization/{n}.py" for n in names] + [f"fp_interface/{n}.py" for n in ("exact", "term")]
    wanted += [f"{n}.py" for n in ("canon", "support")]
    for name in wanted:
        to = tmp_path / folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(source(f"{folder}/{name}"))
    before = set(sys.modules)
    for name in (*PACKAGES, "flashinfer.batch_invariant.fp_interface"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(tmp_path / name.replace(".", "/"))]
        sys.modules[name] = stub
    yield importlib.import_module("flashinfer.batch_invariant.quantization.mx_reference")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_operands_bit_for_bit(oracle: types.ModuleType) -> None:
    torch.manual_seed(0)
    x = (torch.randn(130, 6144) * torch.exp2(torch.randint(-40, 40, (130, 1)).float())).to(torch.bfloat16)
    x[5, 64:96] = 0
    codes, flat, rows = oracle.quantize_mx_reference(x)
    values, scales = formats.quantize_mxfp8(x)
    zero = (x.float().unflatten(1, (-1, 32)) == 0).all(-1)  # any scale is right for a block of zeros
    assert torch.equal(scales[~zero], rows[~zero])
    assert torch.equal(values.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(formats.swizzle_128x4(rows), flat.view(torch.uint8).flatten())


def test_reasons_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: None)
    assert [r.code for r in flashinfer.reasons(25600, 6144)] == ["flashinfer-missing"]
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: object())
    for version, codes in (
        ("0.7.4", []),
        ("0.7.2", []),
        ("0.7.1", ["flashinfer-version"]),
        ("0.8.0", ["flashinfer-version"]),
    ):
        monkeypatch.setattr(flashinfer, "_version", lambda version=version: version)
        assert [r.code for r in flashinfer.reasons(25600, 6144)] == codes
    monkeypatch.setattr(flashinfer, "_version", lambda: "0.7.4")
    for shape in ((120, 6144), (25600, 96), (132, 6144)):
        assert [r.code for r in flashinfer.reasons(*shape)] == ["wkv-shape"]


def test_another_signature_is_refused() -> None:
    def older(a: object, b: object, scale: object) -> None: ...

    (reason,) = flashinfer.signature_reasons(older)
    assert reason.code == "flashinfer-api"
    assert "(a, b, scale)" in reason.message
