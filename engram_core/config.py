"""EngramConfig: the geometry of a model's Engram layers, checked once and frozen.

No key has a default: a guessed geometry would hash to other rows and still look plausible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from engram_core.errors import ConfigError
from engram_core.layout import table_rows

_Positive = Annotated[int, Field(gt=0)]

# Keys of a Hugging Face config.json, in the order in which a missing one is reported.
_HF_KEYS: Final[dict[str, str]] = {
    "hidden_size": "hidden_size",
    "hc_mult": "hc_mult",
    "layer_ids": "engram_layer_ids",
    "num_embeddings": "engram_num_embeddings",
    "vocab_size": "engram_vocab_size",
    "max_ngram_size": "engram_max_ngram_size",
    "n_heads": "engram_n_heads",
    "head_dim": "engram_head_dim",
    "compressed_vocab_size": "engram_compressed_vocab_size",
    "pad_token_id": "engram_pad_token_id",
    "rms_norm_eps": "rms_norm_eps",
}


class EngramConfig(BaseModel):
    """Geometry of the Engram layers of one model; keyword arguments only, all of them required.

    ``hidden_size``: width of a residual stream (5120). ``hc_mult``: residual streams, 1, 2, 4 or 8. ``layer_ids``:
    decoder layers that have Engram, in table order. ``num_embeddings``: rows of each layer's table. ``vocab_size``: the
    base from which the primes start (``engram_vocab_size``, 16,000,000). ``max_ngram_size``: longest n-gram (4).
    ``n_heads``: hashes for each n-gram size (8, at most
    256). ``head_dim``: values in a row, a multiple of 32 (256).
    ``compressed_vocab_size``: size of the token map (99,092). ``pad_token_id``: a raw token id. ``rms_norm_eps``:
    1e-20 for V4.1.

    Raises :class:`ConfigError` that names the key, what came and what is needed.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", ser_json_inf_nan="constants")

    hidden_size: _Positive
    hc_mult: _Positive
    layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    num_embeddings: tuple[_Positive, ...]
    vocab_size: Annotated[int, Field(ge=2, lt=2**40)]
    max_ngram_size: Annotated[int, Field(ge=2, le=16)]
    n_heads: Annotated[int, Field(gt=0, le=256)]  # bounds the search for primes, whatever a file asks for
    head_dim: _Positive
    compressed_vocab_size: Annotated[int, Field(gt=0, lt=2**31)]
    pad_token_id: Annotated[int, Field(ge=0)]
    rms_norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_explain(error, {}, "EngramConfig")) from error

    @field_validator("layer_ids", "num_embeddings", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _fits(self) -> EngramConfig:
        if self.hc_mult not in (1, 2, 4, 8):
            raise ValueError(f"hc_mult is {self.hc_mult}; 1, 2, 4 or 8 is needed")
        if self.head_dim % 32:
            raise ValueError(f"head_dim is {self.head_dim}; a multiple of 32 is needed (one scale for 32 values)")
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ValueError(f"layer_ids is {list(self.layer_ids)}; different layers are needed")
        if len(self.num_embeddings) != len(self.layer_ids):
            raise ValueError(
                f"num_embeddings has {len(self.num_embeddings)} entries; one for each of the {len(self.layer_ids)} "
                f"layers in layer_ids is needed"
            )
        return self

    @property
    def columns(self) -> int:
        """Hash columns, C = (max_ngram_size - 1) * n_heads: rows fetched for each token and layer."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def wkv_in_features(self) -> int:
        """K of the WKV projection, C * head_dim."""
        return self.columns * self.head_dim

    @property
    def wkv_out_features(self) -> int:
        """N of the WKV projection, (hc_mult + 1) * hidden_size: one key for each copy, then the value."""
        return (self.hc_mult + 1) * self.hidden_size

    @classmethod
    def deepseek_v41(cls, vocab_size: int = 16_000_000) -> EngramConfig:
        """The geometry of DeepSeek-V4.1-Flash; a smaller ``vocab_size`` scales the tables down and nothing else."""
        layer_ids, max_ngram_size, n_heads = (1, 14), 4, 8
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 2:
            raise ConfigError(f"vocab_size is {vocab_size!r}; an int of at least 2 is needed")
        return cls(
            hidden_size=5120,
            hc_mult=4,
            layer_ids=layer_ids,
            num_embeddings=table_rows(vocab_size, layer_ids, max_ngram_size, n_heads),
            vocab_size=vocab_size,
            max_ngram_size=max_ngram_size,
            n_heads=n_heads,
            head_dim=256,
            compressed_vocab_size=99_092,
            pad_token_id=2,
            rms_norm_eps=1e-20,
        )

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> EngramConfig:
        """Read a Hugging Face ``config.json``: a mapping, the file, or its folder; keys may be under ``text_config``.

        Raises :class:`ConfigError` that names the file and the key; nothing is guessed.
        """
        where, mapping = _read(source)
        nested = mapping.get("text_config")
        if isinstance(nested, Mapping) and any(key.startswith("engram_") for key in nested):
            where, mapping = f"{where}: text_config", nested
        if not any(key.startswith("engram_") for key in mapping):
            raise ConfigError(
                f"{where}: no engram_* key; this model has no Engram layers (first key needed: engram_layer_ids)"
            )
        for key in _HF_KEYS.values():
            if key not in mapping:
                raise ConfigError(f"{where}: the key {key} is missing")
        try:
            return cls(**{field: mapping[key] for field, key in _HF_KEYS.items()})
        except ConfigError as error:
            cause = error.__cause__
            if not isinstance(cause, ValidationError):
                raise
            raise ConfigError(_explain(cause, _HF_KEYS, where)) from None


def _read(source: Mapping[str, Any] | str | Path) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "config", source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; a readable config.json is needed") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}); a JSON file is needed") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: not JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: not JSON (nested too deep)") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds a {type(loaded).__name__}; a JSON object is needed")
    return str(path), loaded


def _explain(error: ValidationError, names: Mapping[str, str], where: str) -> str:
    """One line for the first fault: where, which key, what came, what is needed."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        message = str(first["msg"]).removeprefix("Value error, ")
        for field, key in names.items():
            if message.startswith(field + " "):
                message = key + message[len(field) :]
        return f"{where}: {message}"
    field, *inner = (str(part) for part in first["loc"])
    key = names.get(field, field) + "".join(f"[{part}]" for part in inner)
    if first["type"] == "missing":
        return f"{where}: the key {key} is missing"
    if first["type"] == "extra_forbidden":
        return f"{where}: the key {key} is unknown"
    value = list(first["input"]) if isinstance(first["input"], tuple) else first["input"]
    need = str(first["msg"])
    return f"{where}: {key} is {value!r} ({type(value).__name__}); {need[:1].lower() + need[1:]}"
