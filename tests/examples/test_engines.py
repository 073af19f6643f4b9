"""docs/engines.md: its code is type-checked, and gives an engine's chunks the ids that whole sequences have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import filled, tiny_config, weights

from engram_core import EngramConfig, EngramMemory, NgramHasher, TokenBatch, TokenMap
from engram_core.backend import EngramBackend
from engram_core.checkpoint import write_checkpoint

ROOT = Path(__file__).parent.parent.parent
DECODER = ROOT / "examples" / "decoder"
NAMES = ("start", "step", "vllm_adapter", "sglang_adapter", "graph", "deferred", "ranks")


def code() -> dict[str, str]:
    """The code of the document, by the names that it has here."""
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return dict(zip(NAMES, blocks, strict=True))


def module(name: str) -> ModuleType:
    made = ModuleType(name)
    exec(compile(code()[name], f"docs/engines.md: {name}", "exec"), made.__dict__)
    return made


@pytest.mark.slow
def test_the_code_of_the_document_and_of_the_example_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    files = [DECODER / "generate.py"]
    for name, text in code().items():
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(text, encoding="utf-8")
    # torch.cuda.CUDAGraph has no types; elsewhere that is said by a comment, which would then be one too many.
    loose = ("--allow-untyped-calls", "--no-warn-unused-ignores", "--cache-dir", str(ROOT / ".mypy_cache" / "engines"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *loose, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": f"{DECODER}:{ROOT}"},
    )
    assert done.returncode == 0, done.stdout


SEQUENCES = ([5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22], [30, 31, 32, 33, 34, 35], [40])
# (request, first, stop) of one step: in the middle, from the start, the last token alone, nothing.
CHUNKS = ((0, 3, 7), (2, 0, 2), (1, 2, 3), (3, 1, 1))


@pytest.fixture
def hasher(config: EngramConfig, token_map: TokenMap, backend: EngramBackend) -> NgramHasher:
    return NgramHasher(config, token_map, backend)


def expected(hasher: NgramHasher, dead: int = -1) -> torch.Tensor:
    wholes = [torch.tensor(tokens) for tokens in SEQUENCES]
    ids = [hasher(TokenBatch.single(whole, whole == dead)) for whole in wholes]
    return torch.cat([ids[request][first:stop] for request, first, stop in CHUNKS])


def packed(dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = [token for request, first, stop in CHUNKS for token in SEQUENCES[request][first:stop]]
    positions = [at for _, first, stop in CHUNKS for at in range(first, stop)]
    lengths = torch.tensor([0] + [stop - first for _, first, stop in CHUNKS])
    return torch.tensor(ids, dtype=dtype), torch.tensor(positions), lengths.cumsum(0).to(torch.int32)


@pytest.mark.parametrize("image", [None, 7, 21])
def test_a_vllm_batch(hasher: NgramHasher, image: int | None) -> None:
    ids, positions, start = packed()
    rows = torch.full((9, 16), 63, dtype=torch.int32)  # other requests' tokens
    place = torch.tensor([4, 0, 8, 2])
    for row, tokens in zip(place.tolist(), SEQUENCES, strict=True):
        rows[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    mapping = place[[request for request, _, _ in CHUNKS]]
    batch = SimpleNamespace(input_ids=ids, positions=positions.int(), query_start_loc=start, idx_mapping=mapping)
    found = module("vllm_adapter").vllm_batch(batch, rows, 3, image)
    assert torch.equal(hasher(found), expected(hasher, -1 if image is None else image))


def test_an_sglang_extend_batch_and_a_decode_batch(hasher: NgramHasher) -> None:
    ids, positions, start = packed(torch.int64)
    history = [[63] * max(0, 2 - first) + SEQUENCES[request][max(0, first - 2) : first] for request, first, _ in CHUNKS]
    batch = SimpleNamespace(
        positions=positions,
        req_pool_indices=torch.tensor([3, 1, 2, 0]),
        extend_start_loc=start[:-1].long(),
        extend_seq_lens=(start[1:] - start[:-1]).long(),
        engram_history=torch.tensor(history),
    )
    convert = module("sglang_adapter").sglang_batch
    assert torch.equal(hasher(convert(ids, batch, torch.zeros(8, 2))), expected(hasher))

    table = torch.full((8, 2), 63)
    slots = torch.tensor([6, 2, 5])
    for slot, tokens in zip(slots.tolist(), SEQUENCES, strict=False):
        table[slot] = torch.tensor(tokens[-3:-1])
    last = SimpleNamespace(
        positions=torch.tensor([len(tokens) - 1 for tokens in SEQUENCES[:3]]),
        req_pool_indices=slots,
        extend_start_loc=None,
        extend_seq_lens=None,
        engram_history=None,
    )
    ids = torch.tensor([tokens[-1] for tokens in SEQUENCES[:3]])
    wanted = torch.cat([hasher(TokenBatch.single(torch.tensor(tokens)))[-1:] for tokens in SEQUENCES[:3]])
    assert torch.equal(hasher(convert(ids, last, table)), wanted)


def test_a_decoder_that_starts_the_chains_itself(
    config: EngramConfig, token_map: TokenMap, backend: EngramBackend
) -> None:
    memory = filled(EngramMemory(config, token_map, backend, max_tokens=8))
    batch = TokenBatch.single(torch.tensor([1, 2, 3]))
    hidden = torch.randn(3, config.hc_mult, config.hidden_size).bfloat16()
    ahead = []

    class Layer:
        def compute(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * 2

        def all_reduce(self, hidden: torch.Tensor) -> torch.Tensor:
            assert memory.prefetch is not None
            ahead.append([i for i, layer in memory.layers.items() if memory.prefetch.started(layer)])
            return hidden + 1

    layers = [Layer()] * (max(config.layer_ids) + 1)
    found = module("deferred").forward(memory, batch, layers, hidden)
    assert (config.layer_ids, ahead[:2], ahead[-1]) == ((1, 14), [[1], [14]], [])
    with memory.step(batch) as step:
        for layer_id in range(len(layers)):
            hidden = step.inject(layer_id, hidden) * 2 + 1
    assert torch.equal(found, hidden)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_loading_and_a_step(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: torch.Tensor
) -> None:
    from tokenizers import Tokenizer, models

    monkeypatch.setenv("ENGRAM_BACKEND", "reference")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    config = tiny_config()
    folder = write_checkpoint(tmp_path / "model", config)
    words = {f"w{n}": n for n in range(config.compressed_vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    start = module("start")
    memory = start.load(folder, range(8), 16, [1, 2])
    assert list(memory.layers) == [1]
    layers = [torch.nn.Identity() for _ in range(3)]
    x = hidden(4)  # type: ignore[operator]
    out = module("step").forward(memory, TokenBatch.single(torch.tensor([5, 6, 7, 8])), layers, x)
    assert not torch.equal(out, x)
    names = weights(config)
    assert start.load_weights(memory, names.items()) == {name for name in names if name.startswith("layers.1.")}


def test_an_engine_s_own_ranks(group: dist.ProcessGroup, config: EngramConfig, token_map: TokenMap) -> None:
    parallel = module("ranks").ranks(group, group)
    memory = filled(EngramMemory(config, token_map, "reference", parallel=parallel, max_tokens=8, device="cpu"))
    ids = torch.arange(5)
    plain = filled(EngramMemory(config, token_map, "reference", max_tokens=8, device="cpu"))
    x = torch.randn(5, 4, 64).bfloat16()
    with memory.step(TokenBatch.single(ids)) as a, plain.step(TokenBatch.single(ids)) as b:
        assert torch.equal(a.inject(1, x), b.inject(1, x))
    row = torch.arange(6).view(1, 2, 3)
    assert torch.equal(parallel.tensor.all_gather(row, 1), row)
    assert torch.equal(parallel.tensor.all_to_all(row), row)
