"""Weights that an engine streams, into the layers that they belong to (:mod:`engram_core.names` says by which name)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from engram_core.checks import check_tensor
from engram_core.errors import InvalidArgumentError
from engram_core.formats import E8M0, FP8
from engram_core.names import EMBED_WEIGHT, WKV_SCALE, WKV_WEIGHT, parse_name

if TYPE_CHECKING:
    from engram_core.layer import Engram


def load_weights(layers: Mapping[int, Engram], weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load what belongs to ``layers`` and return the names taken.

    Raises :class:`InvalidArgumentError` naming the tensor; a tensor is checked whole before it is copied.
    """
    taken: set[str] = set()
    halves: dict[int, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        parsed = parse_name(name)
        layer = layers.get(parsed.layer_id) if parsed else None
        if parsed is None or layer is None:
            continue
        if parsed.part in (WKV_WEIGHT, WKV_SCALE):
            part = "weight" if parsed.part == WKV_WEIGHT else "scale"
            held = halves.setdefault(layer.layer_id, {})
            if part in held:
                raise InvalidArgumentError(name, f"a second {part} (after {held[part][0]})", "one for each layer")
            held[part] = (name, tensor)
            if len(held) == 2:
                layer.wkv.load(held["weight"][1], held["scale"][1])
                del halves[layer.layer_id]
        elif parsed.is_table:
            _load_rows(layer, name, parsed.part == EMBED_WEIGHT, tensor)
        else:
            check_tensor(name, tensor, layer.gate.q_weight.shape, (torch.bfloat16, torch.float32))
            layer.gate.load(**{parsed.part: tensor})
        taken.add(name)
    for layer_id, held in halves.items():
        (name, tensor), *_ = held.values()
        if "weight" not in held:
            raise InvalidArgumentError(name, "a scale without its weight", "wkv.weight and wkv.scale in one call")
        if tensor.dtype != torch.bfloat16:
            raise InvalidArgumentError(name, "a weight without its scale", "wkv.weight and wkv.scale in one call")
        layers[layer_id].wkv.load(tensor)
    return taken


def _load_rows(layer: Engram, name: str, codes: bool, tensor: torch.Tensor) -> None:
    table = layer.table
    if table.spec.placement == "file":
        raise InvalidArgumentError(name, "rows for a table of placement 'file'", "no rows: the file holds them")
    dim = table.spec.head_dim
    if codes:
        check_tensor(name, tensor, (table.spec.rows, dim), (FP8,))
        table.load(tensor, None)
    else:
        check_tensor(name, tensor, (table.spec.rows, dim // 32), (E8M0, torch.uint8))
        table.load(None, tensor)
