"""The names of Engram's tensors, in DeepSeek-V4.1's checkpoints and in those that the common converters write.

One table for everything that reads weights: an engine that streams them, and the reader of checkpoints.

``[model.]layers.N.engram.``: ``embed.weight`` ``[rows, D]`` e4m3fn and ``embed.scale`` ``[rows, D/32]`` e8m0 (also
``embed_tokens``); ``wkv.weight`` ``[N, K]`` and ``wkv.scale``; ``q_weight``, ``k_weight`` ``[H, dim]``. A scale may be
named ``weight_scale`` or ``weight_scale_inv`` (a converter's word: it is the factor itself, not its inverse).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

EMBED_WEIGHT: Final = "embed.weight"
EMBED_SCALE: Final = "embed.scale"
WKV_WEIGHT: Final = "wkv.weight"
WKV_SCALE: Final = "wkv.scale"
Q_WEIGHT: Final = "q_weight"
K_WEIGHT: Final = "k_weight"
PARTS: Final = (EMBED_WEIGHT, EMBED_SCALE, WKV_WEIGHT, WKV_SCALE, Q_WEIGHT, K_WEIGHT)
"""What a layer has, under DeepSeek-V4.1's own names."""

_NAME = re.compile(
    r"(?:model\.)?layers\.(?P<layer>\d+)\.engram\."
    r"(?:(?P<module>embed|embed_tokens|wkv)\.(?P<part>weight|scale|weight_scale|weight_scale_inv)|(?P<gate>[qk]_weight))\Z"
)


class EngramName(NamedTuple):
    """``layer_id``: of the decoder layer; ``part``: one of :data:`PARTS`, whatever the checkpoint calls it."""

    layer_id: int
    part: str

    @property
    def is_table(self) -> bool:
        """Whether it is the table's (its codes or its scales)."""
        return self.part in (EMBED_WEIGHT, EMBED_SCALE)


def parse_name(name: str) -> EngramName | None:
    """What a checkpoint's tensor is; None for one that is none of Engram's."""
    match = _NAME.match(name)
    if match is None:
        return None
    if match["gate"]:
        return EngramName(int(match["layer"]), match["gate"])
    module = "wkv" if match["module"] == "wkv" else "embed"
    part = "weight" if match["part"] == "weight" else "scale"
    return EngramName(int(match["layer"]), f"{module}.{part}")


def tensor_name(layer_id: int, part: str) -> str:
    """DeepSeek-V4.1's own name of a layer's ``part``."""
    return f"layers.{layer_id}.engram.{part}"
