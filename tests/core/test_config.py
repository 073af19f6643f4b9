"""The configuration: every fault of a config.json is one line that names the key and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import tiny_config

from engram_core import EngramConfig, HashLayout
from engram_core.errors import ConfigError, EngramError

HF = {
    "hidden_size": 5120,
    "hc_mult": 4,
    "rms_norm_eps": 1e-20,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_vocab_size": 16_000_000,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99_092,
    "engram_pad_token_id": 2,
}


def test_published_geometry() -> None:
    config = EngramConfig.deepseek_v41()
    assert config.num_embeddings == (384_006_168, 384_016_682)
    assert (config.columns, config.wkv_in_features, config.wkv_out_features) == (24, 6144, 25600)


def test_a_smaller_base_scales_the_tables_alone() -> None:
    small, real = EngramConfig.deepseek_v41(1000), EngramConfig.deepseek_v41()
    changed = {key for key, value in small if value != getattr(real, key)}
    assert changed == {"vocab_size", "num_embeddings"}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("form", ["mapping", "file", "folder"])
def test_from_hf(tmp_path: Path, form: str, nested: bool) -> None:
    mapping: dict[str, Any] = {"model_type": "x", "text_config": HF} if nested else {"model_type": "x", **HF}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(mapping), encoding="utf-8")
    source = {"mapping": mapping, "file": path, "folder": tmp_path}[form]
    assert EngramConfig.from_hf(source) == EngramConfig.deepseek_v41()


@pytest.mark.parametrize("key", HF)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"the key {key} is missing"):
        EngramConfig.from_hf({k: v for k, v in HF.items() if k != key})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("engram_n_heads", "8", "engram_n_heads is '8' (str); input should be a valid integer"),
        ("engram_n_heads", True, "engram_n_heads is True (bool)"),
        ("engram_n_heads", 0, "engram_n_heads is 0 (int); input should be greater than 0"),
        ("engram_layer_ids", [1, "x"], "engram_layer_ids[1] is 'x' (str)"),
        ("engram_layer_ids", [], "engram_layer_ids is []"),
        ("engram_layer_ids", [1, 1], "engram_layer_ids is [1, 1]; different layers are needed"),
        ("engram_layer_ids", [1], "engram_num_embeddings has 2 entries; one for each of the 1"),
        ("engram_head_dim", 250, "engram_head_dim is 250; a multiple of 32"),
        ("hc_mult", 3, "hc_mult is 3; 1, 2, 4 or 8 is needed"),
        ("rms_norm_eps", None, "rms_norm_eps is None"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("engram_pad_token_id", -1, "engram_pad_token_id is -1"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngramConfig.from_hf({**HF, key: value})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "holds a list"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"a": %s}' % (b"9" * 5000), "not JSON"),
        (b"\xff{}", "not UTF-8"),
        (b"{}", "no engram_* key"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        EngramConfig.from_hf(path)
    assert said in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: No such file"):
        EngramConfig.from_hf(tmp_path / "nowhere" / "config.json")


def test_no_defaults_and_no_unknown_keys() -> None:
    values = tiny_config().model_dump()
    for key in values:
        with pytest.raises(EngramError, match=f"the key {key} is missing"):
            EngramConfig(**{k: v for k, v in values.items() if k != key})
    with pytest.raises(ConfigError, match="the key hc_mul is unknown"):
        EngramConfig(**values, hc_mul=4)


def test_a_table_smaller_than_its_primes_is_refused_with_both_numbers() -> None:
    config = tiny_config(num_embeddings=(60, 119))
    with pytest.raises(ConfigError, match=r"layer 14 has 119 rows.*sum to 120"):
        HashLayout.from_config(config)


def test_a_larger_table_is_taken() -> None:
    assert HashLayout.from_config(tiny_config(num_embeddings=(61, 500))).rows == (60, 120)
