"""Loading: every name, every placement, every rank; only what is needed is read."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Ranks, bits, shard_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engram_core import EngramConfig, EngramMemory, Parallel, TokenBatch, TokenMap
from engram_core.backend import EngramBackend
from engram_core.checkpoint import Checkpoint, pack_table, write_checkpoint
from engram_core.checkpoint.load import MemoryOptions
from engram_core.checkpoint.progress import byte_progress
from engram_core.synthetic import Synthetic

Load = Callable[..., EngramMemory]


def same(memory: EngramMemory, other: EngramMemory) -> None:
    batch = TokenBatch.single(torch.arange(20))
    hidden = torch.randn(20, 4, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    outputs = []
    for each in (memory, other):
        with each.step(batch) as step:
            outputs.append([step.inject(layer_id, hidden) for layer_id in each.layers])
    assert memory.layers.keys() == other.layers.keys()
    for a, b, layer_id in zip(*outputs, memory.layers, strict=True):
        assert not torch.equal(a, hidden)
        assert torch.equal(a, b)
        assert torch.equal(memory.layers[layer_id].table.packed, other.layers[layer_id].table.packed)


@pytest.mark.parametrize("placement", ["device", "host", "shared"])
def test_a_checkpoint_of_ours_loads(folder: Path, load: Load, expected: EngramMemory, placement: str) -> None:
    same(load(folder, placement=placement), expected)


def test_it_is_what_plain_safetensors_reads(folder: Path, small: EngramConfig) -> None:
    synthetic, names = Synthetic(small, 5), set()
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            names.add(name)
            layer_id = int(name.split(".")[1])
            if ".embed." in name:
                codes, scales = synthetic.rows(layer_id, 0, small.num_embeddings[layer_id == 14])
                wanted = scales.view(torch.float8_e8m0fnu) if name.endswith("scale") else codes
            elif ".engram." in name:
                wanted = dict(synthetic.tensors(layer_id))[name]
            else:
                continue
            assert tensor.dtype == wanted.dtype
            assert tensor.shape == wanted.shape
            assert torch.equal(bits(tensor), bits(wanted))
    assert names == {
        f"layers.{i}.engram.{part}"
        for i in (1, 14)
        for part in ("embed.weight", "embed.scale", "wkv.weight", "wkv.scale", "q_weight", "k_weight")
    } | {"layers.0.attn_norm.weight"}


def test_an_engine_streams_what_plain_safetensors_reads(
    folder: Path, small: EngramConfig, token_map: TokenMap, backend: EngramBackend, expected: EngramMemory
) -> None:
    memory = EngramMemory(small, token_map, backend, max_tokens=32)
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    assert memory.load_weights(tensors.items()) == tensors.keys() - {"layers.0.attn_norm.weight"}
    same(memory, expected)


def test_names_that_converters_write(tmp_path: Path, small: EngramConfig, load: Load, expected: EngramMemory) -> None:
    folder = write_checkpoint(tmp_path / "converted", small, 5, converted=True)
    names = Checkpoint.open(folder).files
    assert "model.layers.1.engram.embed_tokens.weight_scale_inv" in names
    assert "model.layers.14.engram.wkv.weight_scale" in names
    same(load(folder), expected)


@pytest.mark.parametrize("target", ["folder", "file"])
def test_one_file_without_an_index(
    folder: Path, tmp_path: Path, load: Load, expected: EngramMemory, target: str
) -> None:
    """Written by the safetensors library, scales as their bytes in uint8."""
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    tensors = {name: t.view(torch.uint8) if name.endswith("scale") else t for name, t in tensors.items()}
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(folder / "config.json", single)
    save_file(tensors, single / "model.safetensors")
    same(load(single if target == "folder" else single / "model.safetensors"), expected)


def test_a_bf16_projection_without_scale(folder: Path, load: Load, small: EngramConfig) -> None:
    path = shard_of(folder, "layers.1.engram.wkv.weight")
    tensors = load_file(path)
    weight = torch.randn(small.wkv_out_features, small.wkv_in_features).bfloat16()
    del tensors["layers.1.engram.wkv.scale"]
    save_file({**tensors, "layers.1.engram.wkv.weight": weight}, path)
    index = folder / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"layers.1.engram.wkv.scale"', '"layers.1.attn.scale"'), encoding="utf-8"
    )
    layer = load(folder).layers[1]
    rows = torch.randn(2, small.columns, small.head_dim).bfloat16()
    wanted = rows.flatten(1).float() @ weight.float().T
    assert torch.allclose(layer.project(rows).float(), wanted, rtol=2**-7, atol=2**-7)


def test_a_stage_reads_no_other_stage_s_table(folder: Path, load: Load, expected: EngramMemory) -> None:
    shard_of(folder, "layers.14.engram.embed.weight").unlink()
    memory = load(folder, layer_ids=(1,))
    assert list(memory.layers) == [1]
    assert torch.equal(memory.layers[1].table.packed, expected.layers[1].table.packed)
    assert not load(folder, layer_ids=()).layers


@pytest.mark.parametrize(("rank", "size"), [(0, 4), (3, 4), (1, 3), (2, 3)])
def test_a_rank_reads_its_rows_alone(
    folder: Path,
    load: Load,
    expected: EngramMemory,
    rank: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four ranks cut the four columns; three would leave one rank empty, and cut by rows."""
    read: list[int] = []
    usual = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = usual(descriptor, buffers, offset)
        read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    memory = load(folder, parallel=Parallel(Ranks(rank, size)))
    tables = 0
    for layer_id, layer in memory.layers.items():
        shard = layer.table.shard
        whole = expected.layers[layer_id].table.packed
        assert 0 < shard.rows < whole.shape[0]
        assert torch.equal(layer.table.packed, whole[shard.row_start : shard.row_stop])
        tables += layer.table.packed.numel()
    checkpoint = Checkpoint.open(folder)
    assert sum(read) == tables + sum(t.nbytes for layer in checkpoint.layers().values() for t in layer.small)


def test_pieces_smaller_than_the_table(
    folder: Path, load: Load, expected: EngramMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_core.checkpoint.pieces.PIECE_BYTES", 66 * 100 + 13)
    same(load(folder), expected)


def test_reads_that_come_short_are_continued(
    folder: Path, load: Load, expected: EngramMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: usual(fd, [buffers[0][:1000]], at))
    same(load(folder), expected)


@pytest.mark.parametrize(("placement", "dropped"), [("device", True), ("host", True), ("file", False)])
def test_the_page_cache_of_what_was_read_is_dropped_where_tables_are_in_ram(
    folder: Path, tmp_path: Path, load: Load, placement: str, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, object] = {"placement": placement}
    if placement == "file":
        options["table_path"] = tmp_path / "packed"
        for tensors in Checkpoint.open(folder).layers().values():
            pack_table(tensors, tmp_path / "packed")
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, n, how: seen.append((n, how)))
    load(folder, **options)
    assert bool(seen) == dropped
    assert {how for _, how in seen} <= {os.POSIX_FADV_DONTNEED}


def test_the_tokenizer_of_the_folder_is_used(folder: Path, small: EngramConfig, backend: EngramBackend) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{n}": n for n in range(small.compressed_vocab_size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    memory = EngramMemory.from_pretrained(folder, backend=backend, max_tokens=32)
    assert memory.token_map.size == small.compressed_vocab_size


def test_options_are_those_of_the_constructor() -> None:
    assert [*MemoryOptions.__annotations__] == [*signature(EngramMemory.__init__).parameters][3:]


def test_a_subclass_loads_as_itself(folder: Path, token_map: TokenMap, backend: EngramBackend) -> None:
    class Mine(EngramMemory):
        pass

    assert type(Mine.from_pretrained(folder, token_map, backend=backend, max_tokens=32)) is Mine


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_bytes_rate_and_time_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for stream, enabled in ((_Terminal(), True), (_Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with byte_progress("loading it", 2**20, enabled) as report:
            report(2**19)
        shown.append(stream.getvalue())
    assert "loading it" in shown[0]
    assert "0.5/1.0 MiB" in shown[0]
    assert shown[1:] == ["", ""]


def test_header_is_read_by_the_library_too(folder: Path) -> None:
    for tensors in Checkpoint.open(folder).layers().values():
        for stored in tensors.all:
            with safe_open(stored.file, framework="pt") as file:
                view = file.get_slice(stored.name)
                assert (view.get_dtype(), tuple(view.get_shape())) == (stored.dtype, stored.shape)
