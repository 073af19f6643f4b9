"""Whether a layer's tensors in a checkpoint are those that the configuration asks for: count, dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engram_core.checkpoint.shard import Stored
from engram_core.errors import CheckpointError
from engram_core.formats import BLOCK
from engram_core.names import (
    EMBED_SCALE,
    EMBED_WEIGHT,
    K_WEIGHT,
    PARTS,
    Q_WEIGHT,
    WKV_SCALE,
    WKV_WEIGHT,
    parse_name,
    tensor_name,
)

if TYPE_CHECKING:
    from engram_core.config import EngramConfig

_SCALES: Final = ("F8_E8M0", "U8")
_DTYPES: Final = {
    EMBED_WEIGHT: ("F8_E4M3",),
    EMBED_SCALE: _SCALES,
    WKV_WEIGHT: ("F8_E4M3", "BF16"),
    WKV_SCALE: _SCALES,
    Q_WEIGHT: ("BF16", "F32"),
    K_WEIGHT: ("BF16", "F32"),
}


@dataclass(frozen=True)
class LayerTensors:
    """One layer: ``codes`` and ``scales`` of its table (None where the rows come from elsewhere), its WKV and gate."""

    layer_id: int
    codes: Stored | None
    scales: Stored | None
    wkv_weight: Stored
    wkv_scale: Stored | None
    q_weight: Stored
    k_weight: Stored

    @property
    def small(self) -> tuple[Stored, ...]:
        """All but the table."""
        return tuple(t for t in (self.wkv_weight, self.wkv_scale, self.q_weight, self.k_weight) if t is not None)

    @property
    def all(self) -> tuple[Stored, ...]:
        """Every tensor of the layer that is read."""
        return tuple(t for t in (self.codes, self.scales) if t is not None) + self.small


def layer_tensors(
    folder: Path, layer_id: int, stored: Sequence[Stored], config: EngramConfig, tables: bool
) -> LayerTensors:
    """Sort ``stored`` by part; raises :class:`CheckpointError` for a part that is missing or there twice."""
    parts: dict[str, Stored] = {}
    for tensor in stored:
        parsed = parse_name(tensor.name)
        assert parsed is not None  # folder.py keeps Engram's alone
        if parsed.part in parts:
            raise CheckpointError(
                f"{tensor}: a second {parsed.part} of layer {layer_id}, after {parts[parsed.part]}; one is needed"
            )
        parts[parsed.part] = tensor
    bf16 = WKV_WEIGHT in parts and parts[WKV_WEIGHT].dtype == "BF16"
    if bf16 and WKV_SCALE in parts:
        raise CheckpointError(f"{parts[WKV_SCALE]}: a scale of a BF16 weight; BF16 weights have none")
    for part in PARTS:
        optional = (part == WKV_SCALE and bf16) or (part in (EMBED_WEIGHT, EMBED_SCALE) and not tables)
        if part not in parts and not optional:
            have = ", ".join(sorted(tensor.name for tensor in stored)) or "none"
            raise CheckpointError(
                f"{folder}: {tensor_name(layer_id, part)}: missing; layer {layer_id} has {len(stored)} Engram tensors "
                f"({have})"
            )
    return LayerTensors(
        layer_id,
        parts.get(EMBED_WEIGHT),
        parts.get(EMBED_SCALE),
        parts[WKV_WEIGHT],
        parts.get(WKV_SCALE),
        parts[Q_WEIGHT],
        parts[K_WEIGHT],
    )


def check_layers(config: EngramConfig, layers: Mapping[int, LayerTensors]) -> None:
    """Raises :class:`CheckpointError` for the first tensor whose dtype or shape is not what ``config`` needs."""
    n, k = config.wkv_out_features, config.wkv_in_features
    gate = (config.hc_mult, config.hidden_size)
    for layer_id, layer in layers.items():
        rows = config.num_embeddings[config.layer_ids.index(layer_id)]
        if layer.codes is not None:
            _check(layer.codes, EMBED_WEIGHT, [(rows, config.head_dim)])
        if layer.scales is not None:
            _check(layer.scales, EMBED_SCALE, [(rows, config.head_dim // BLOCK)])
        _check(layer.wkv_weight, WKV_WEIGHT, [(n, k)])
        if layer.wkv_scale is not None:
            blocks = [(n // BLOCK, k // BLOCK)] if n % BLOCK == 0 else []
            _check(layer.wkv_scale, WKV_SCALE, [*blocks, (n, k // BLOCK)])
        _check(layer.q_weight, Q_WEIGHT, [gate])
        _check(layer.k_weight, K_WEIGHT, [gate])


def _check(tensor: Stored, part: str, shapes: Sequence[tuple[int, ...]]) -> None:
    if tensor.dtype in _DTYPES[part] and tensor.shape in shapes:
        return
    need = f"{' or '.join(_DTYPES[part])} {' or '.join(str(list(shape)) for shape in shapes)}"
    raise CheckpointError(f"{tensor}: found {tensor.dtype} {list(tensor.shape)}; needed {need}")
