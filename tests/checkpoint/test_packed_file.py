"""The file that placement "file" maps: whose it must be, and how fast it opens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_core import EngramConfig, EngramMemory, TokenMap
from engram_core.backend import EngramBackend
from engram_core.checkpoint import Checkpoint, LayerTensors, pack_table
from engram_core.errors import TableError

Load = Callable[..., EngramMemory]


def test_packed_tables_need_no_tables_in_the_checkpoint(
    folder: Path, out: Path, load: Load, expected: EngramMemory
) -> None:
    """94 GiB of shards can be deleted once they are packed."""
    for tensors in Checkpoint.open(folder).layers().values():
        pack_table(tensors, out)
        assert tensors.codes is not None
        tensors.codes.file.unlink()
    memory = load(folder, placement="file", table_path=out)
    for layer_id, layer in memory.layers.items():
        assert torch.equal(layer.table.packed, expected.layers[layer_id].table.packed)
    named = load(folder, placement="file", table_path=out / "engram-layer-{layer_id}.rows")
    assert named.layers.keys() == memory.layers.keys()


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda held: held.update(format="x"), "json: format is 'x'; 'engram-packed-rows-1' is needed"),
        (lambda held: held.pop("rows"), "json: 'rows'; engram-core pack makes it anew"),
        (lambda held: held.update(rows=2055), "rows: has 135696 bytes; 2055 rows of 66 need 135630"),
        (lambda held: held.update(rows="2056"), "json: has {.*}; whole numbers above 0"),
        (lambda held: held["checksums"].pop(), "json: its checksums and its fingerprint don't agree"),
        (lambda held: held.update(layer_id=14), "rows: holds layer 14, 2056 rows of 64 values; the configuration"),
    ],
)
def test_another_file_than_the_configuration_needs(
    folder: Path, source: LayerTensors, out: Path, load: Load, alter: Callable[[dict[str, Any]], None], said: str
) -> None:
    pack_table(source, out)
    beside = out / "engram-layer-1.rows.json"
    held = json.loads(beside.read_text())
    alter(held)
    beside.write_text(json.dumps(held))
    with pytest.raises(TableError, match=said):
        load(folder, placement="file", table_path=out, layer_ids=(1,))


def test_it_opens_in_under_a_second_whatever_its_size(
    tmp_path: Path, small: EngramConfig, token_map: TokenMap, backend: EngramBackend
) -> None:
    """A sparse file of the real size: 94.4 GiB of zero rows."""
    rows, width = 384_006_168, 264
    config = small.model_copy(update={"num_embeddings": (rows, rows), "head_dim": 256})
    path = tmp_path / "engram-layer-1.rows"
    with open(path, "wb") as file:
        file.truncate(rows * width)
        file.seek((rows - 1) * width)
        file.write(b"\x38" * 256 + b"\x80" * 8)
    begin = time.perf_counter()
    memory = EngramMemory(
        config, token_map, backend, placement="file", table_path={1: path}, layer_ids=(1,), max_tokens=8
    )
    found = memory.layers[1].table.lookup(torch.tensor([[rows - 1, 0, rows - 2, rows]]))
    assert time.perf_counter() - begin < 1
    assert found[0, :, 0].tolist() == [2.0, 0.0, 0.0, 0.0]
