"""A checkpoint in the real format with seeded random weights: for tests, demonstrations and measurements.

Written as DeepSeek-V4.1 is: a shard for each layer's table, one for the rest, an index, ``config.json``; in pieces, so
that a table larger than memory can be made. The folder gets its name when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engram_core.checkpoint.folder import INDEX
from engram_core.checkpoint.progress import byte_progress
from engram_core.checkpoint.shard import ITEM_BYTES, write_header
from engram_core.errors import CheckpointError
from engram_core.formats import BLOCK
from engram_core.names import EMBED_SCALE, EMBED_WEIGHT, K_WEIGHT, Q_WEIGHT, WKV_SCALE, WKV_WEIGHT, tensor_name
from engram_core.synthetic import Synthetic

if TYPE_CHECKING:
    from engram_core.config import EngramConfig

_PIECE_ROWS: Final = 2**16
_METADATA: Final = {"format": "pt"}
# A decoder's own tensor, so that a reader which takes more than Engram's is noticed.
_OTHER: Final = "layers.0.attn_norm.weight"

CONVERTED: Final = {EMBED_WEIGHT: "embed_tokens.weight", EMBED_SCALE: "embed_tokens.weight_scale_inv",
                    WKV_SCALE: "wkv.weight_scale"}  # fmt: skip
"""Names that common converters write in place of DeepSeek's."""


def write_checkpoint(
    folder: str | Path,
    config: EngramConfig,
    seed: int = 0,
    *,
    tokenizer: str | Path | None = None,
    converted: bool = False,
    progress: bool = True,
) -> Path:
    """Write the checkpoint of :class:`Synthetic` ``(config, seed)`` to ``folder``, which must not exist yet.

    ``tokenizer``: a ``tokenizer.json`` to put in. ``converted``: a converter's names and prefix.
    Raises :class:`CheckpointError` where the folder is there already or the disk is too small, with the numbers.
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder}: is there already; a folder that does not exist yet is needed")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        draft.mkdir(parents=True)
        _fill(draft, Synthetic(config, seed), converted, progress)
        (draft / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / "tokenizer.json")
        draft.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def hf_config(config: EngramConfig) -> dict[str, object]:
    """``config.json`` of the Engram layers, under the model's keys."""
    held = config.model_dump(mode="json")
    own = ("hidden_size", "hc_mult", "rms_norm_eps")
    keys = {key: held[key] for key in own} | {f"engram_{key}": held[key] for key in held if key not in own}
    return {"model_type": "deepseek_v4", "num_hidden_layers": max(config.layer_ids) + 1, **keys}


def _fill(folder: Path, synthetic: Synthetic, converted: bool, progress: bool) -> None:
    config = synthetic.config
    shards = [_table(synthetic, layer_id) for layer_id in config.layer_ids]
    shards.append(_rest(synthetic))
    files = {f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards)}
    total = sum(_bytes(shard.tensors) for shard in shards)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise CheckpointError(f"{folder.parent}: has {free} bytes free; the checkpoint needs {total}")
    weight_map = {}
    with byte_progress(f"writing {len(files)} shards", total, progress) as report:
        for name, shard in files.items():
            tensors = {_name(tensor, converted): kind for tensor, kind in shard.tensors.items()}
            weight_map.update(dict.fromkeys(tensors, name))
            with open(folder / name, "wb") as file:
                file.write(write_header(tensors, _METADATA))
                for piece in shard.pieces():
                    report(file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _Shard:
    """``tensors``: dtype and shape by name, in file order; ``pieces``: their bytes in that order."""

    def __init__(
        self, tensors: dict[str, tuple[str, tuple[int, ...]]], pieces: Callable[[], Iterator[torch.Tensor]]
    ) -> None:
        self.tensors = tensors
        self.pieces = pieces


def _table(synthetic: Synthetic, layer_id: int) -> _Shard:
    config = synthetic.config
    rows = config.num_embeddings[config.layer_ids.index(layer_id)]

    def pieces() -> Iterator[torch.Tensor]:
        for part in (0, 1):  # all codes, then all scales: the rows are drawn twice, and never held
            for start in range(0, rows, _PIECE_ROWS):
                yield synthetic.rows(layer_id, start, min(_PIECE_ROWS, rows - start))[part]

    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        tensor_name(layer_id, EMBED_WEIGHT): ("F8_E4M3", (rows, config.head_dim)),
        tensor_name(layer_id, EMBED_SCALE): ("F8_E8M0", (rows, config.head_dim // BLOCK)),
    }
    return _Shard(tensors, pieces)


def _rest(synthetic: Synthetic) -> _Shard:
    config = synthetic.config
    n, k = config.wkv_out_features, config.wkv_in_features
    gate = (config.hc_mult, config.hidden_size)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer_id in config.layer_ids:
        tensors |= {
            tensor_name(layer_id, WKV_WEIGHT): ("F8_E4M3", (n, k)),
            tensor_name(layer_id, WKV_SCALE): ("F8_E8M0", (n // BLOCK if n % BLOCK == 0 else n, k // BLOCK)),
            tensor_name(layer_id, Q_WEIGHT): ("BF16", gate),
            tensor_name(layer_id, K_WEIGHT): ("BF16", gate),
        }
    tensors[_OTHER] = ("BF16", (config.hidden_size,))

    def pieces() -> Iterator[torch.Tensor]:
        for layer_id in config.layer_ids:
            for _, tensor in synthetic.tensors(layer_id):
                yield tensor
        yield torch.ones(config.hidden_size, dtype=torch.bfloat16)

    return _Shard(tensors, pieces)


def _name(name: str, converted: bool) -> str:
    if not converted:
        return name
    for part, other in CONVERTED.items():
        if name.endswith("." + part):
            name = name.removesuffix(part) + other
    return "model." + name


def _bytes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(torch.Size(shape).numel() * ITEM_BYTES[dtype] for dtype, shape in tensors.values())
