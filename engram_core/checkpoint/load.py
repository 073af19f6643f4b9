"""A checkpoint into a memory: all files are judged first, then memory is allocated, then this rank's rows are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack

from engram_core.checkpoint.folder import Checkpoint
from engram_core.checkpoint.packed import packed_files
from engram_core.checkpoint.pieces import read_rows, read_whole
from engram_core.checkpoint.progress import byte_progress
from engram_core.errors import CheckpointError
from engram_core.hashing import check_token_map
from engram_core.tokens import TokenMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from engram_core.backend import EngramBackend
    from engram_core.checkpoint.layers import LayerTensors
    from engram_core.layer import Engram
    from engram_core.memory import EngramMemory
    from engram_core.parallel import Parallel
    from engram_core.table import EngramTable

_Memory = TypeVar("_Memory", bound="EngramMemory")


class MemoryOptions(TypedDict, total=False):
    """The keyword arguments of :class:`EngramMemory`, but for the configuration and the token map."""

    backend: str | EngramBackend | None
    placement: str
    parallel: Parallel | None
    max_tokens: int
    device: torch.device | str | None
    layer_ids: Sequence[int] | None
    table_path: str | Path | Mapping[int, str | Path] | None
    cache_bytes: int
    prefetch_rows: int
    keep_bf16: bool


def load_checkpoint(
    kind: type[_Memory],
    path: str | Path,
    token_map: TokenMap | None = None,
    *,
    progress: bool = True,
    **options: Unpack[MemoryOptions],
) -> _Memory:
    """See :meth:`EngramMemory.from_pretrained`."""
    checkpoint = Checkpoint.open(path)
    from_file = options.get("placement", "device") == "file"
    layers = checkpoint.layers(options.get("layer_ids"), tables=not from_file)
    if token_map is None:
        token_map = _token_map(checkpoint)
    check_token_map(checkpoint.config, token_map)
    table_path = options.get("table_path")
    if from_file and isinstance(table_path, (str, Path)) and Path(table_path).is_dir():
        packed = packed_files(table_path, layers)
        for layer_id, file in packed.items():
            file.check(checkpoint.config, layer_id)
        options["table_path"] = {layer_id: file.path for layer_id, file in packed.items()}
    memory = kind(checkpoint.config, token_map, **options)
    total = sum(_bytes_read(memory.layers[layer_id], tensors) for layer_id, tensors in layers.items())
    with byte_progress(f"loading {checkpoint.folder.name}", total, progress) as report:
        for layer_id, tensors in layers.items():
            _load_table(memory.layers[layer_id], tensors, report)
        # One call: of placement "shared" its end is where all ranks meet, so every table is whole after it.
        memory.load_weights(
            (tensor.name, read_whole(tensor, report)) for tensors in layers.values() for tensor in tensors.small
        )
    return memory


def _load_table(layer: Engram, tensors: LayerTensors, report: Callable[[int], None]) -> None:
    table = layer.table
    if tensors.codes is None or tensors.scales is None:  # placement "file": the file holds its rows
        return
    stored = table.stored_rows
    in_ram = table.packed.device.type == "cpu"
    pieces = read_rows(
        tensors.codes, tensors.scales, stored.start, stored.stop, report, drop_cache=in_ram, pinned=_pin(table)
    )
    for start, codes, scales in pieces:
        table.load(codes, scales, start)


def _bytes_read(layer: Engram, tensors: LayerTensors) -> int:
    rows = 0 if tensors.codes is None else len(layer.table.stored_rows)
    return rows * layer.table.spec.width + sum(tensor.nbytes for tensor in tensors.small)


def _pin(table: EngramTable) -> bool:
    """Whether page-locked buffers make the copy to the table's device faster."""
    return table.packed.device.type == "cuda"


def _token_map(checkpoint: Checkpoint) -> TokenMap:
    path = checkpoint.folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the model's tokenizer.json, or the argument token_map, is needed")
    return TokenMap.from_tokenizer(path, checkpoint.config.pad_token_id)
