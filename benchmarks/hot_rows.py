"""How much of real text's look-ups few rows serve, and how many rows of a batch are different ones.

Each FOLDER is a corpus, each folder in it a project, each file a document (files that are there twice count once). Half
of the documents are learnt from, the other half is measured; a second split puts whole projects on either side. Prints
Markdown; ``--out`` gets ``real_tokens.npy`` (int32, whole held-out documents one after another), ``real_starts.npy``
(where each begins) and ``hot_rows.safetensors`` (learnt on the other half, cut to 0.6 GB of rows a layer).
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engram_core import EngramConfig, TokenMap
from engram_core.cli.corpus import Corpus
from engram_core.cli.inputs import shipped_tokenizer
from engram_core.formats import packed_width
from engram_core.hashing import TorchHasher
from engram_core.hot import HotRows
from engram_core.hot_count import RowCounter, document_batches
from engram_core.tokens import load_tokenizer

SIZES_GB = (0.06, 0.6, 6.0)
BATCHES = (256, 1024, 4096, 16384)
LARGEST_FILE = 200_000  # bytes; a larger one alone would be a tenth of a small half
SAVED_TOKENS = 200_000


@dataclass(frozen=True)
class Text:
    """One document; ``project``: the folder of the corpus that it lies in."""

    corpus: str
    project: str
    ids: list[int]


def read(folder: Path, tokens: int, draw: random.Random, encode: Callable[[str], list[int]]) -> list[Text]:
    """Documents of about ``tokens`` tokens in all, drawn at random."""
    files = Corpus.of([str(folder)]).found
    draw.shuffle(files)
    seen: set[bytes] = set()
    found: list[Text] = []
    held = 0
    for file in files:
        raw = file.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if digest in seen or len(raw) > LARGEST_FILE or b"\0" in raw:
            continue
        seen.add(digest)
        try:
            ids = encode(raw.decode("utf-8-sig"))
        except UnicodeDecodeError:
            continue
        found.append(Text(folder.name, file.relative_to(folder).parts[0], ids))
        held += len(ids)
        if held >= tokens:
            break
    return found


def by_project(texts: Sequence[Text], draw: random.Random) -> tuple[list[Text], list[Text]]:
    """Halves of about the same number of tokens, that have no project in common."""
    projects = sorted({(text.corpus, text.project) for text in texts})
    draw.shuffle(projects)
    halves: tuple[list[Text], list[Text]] = ([], [])
    for project in projects:
        smaller = min(halves, key=lambda half: sum(len(text.ids) for text in half))
        smaller.extend(text for text in texts if (text.corpus, text.project) == project)
    return halves


class Model:
    """DeepSeek-V4.1-Flash's hash, and what is measured with it."""

    def __init__(self, token_map: TokenMap) -> None:
        self.config, self.map = EngramConfig.deepseek_v41(), token_map
        self.width = packed_width(self.config.head_dim)
        self.counted: dict[tuple[int, ...], HotRows] = {}

    def count(self, texts: Sequence[Text], layers: Sequence[int]) -> HotRows:
        counter = RowCounter(self.config, self.map, layers)
        counter.add_documents([text.ids for text in texts])
        return counter.result()

    def rows(self, size_gb: float) -> int:
        return int(size_gb * 1e9) // self.width

    def served(self, learnt: HotRows, measured: HotRows, layer: int) -> str:
        """Cells of a table: tokens of either, then the share at each size; rows where fewer were seen."""
        known = learnt.ids[layer].numel()
        cells = [f"{learnt.tokens / 1e6:.2f} M", f"{measured.tokens / 1e6:.2f} M"]
        for size in SIZES_GB:
            share = learnt.served(measured, layer, self.rows(size)) / (measured.tokens * self.config.columns)
            fewer = f" (all {known / 1e6:.1f} M rows learnt: {known * self.width / 1e9:.1f} GB)"
            cells.append(f"{share:.1%}{fewer if known < self.rows(size) else ''}")
        return " | ".join(cells)

    def hash_ids(self, texts: Sequence[Text], layer: int) -> np.ndarray:
        """[T, C] of all texts one after another."""
        counter = RowCounter(self.config, self.map, [layer])
        hasher = TorchHasher(counter.layout, self.map, torch.device("cpu"))
        index = counter.layout.index(layer)
        batches = document_batches([text.ids for text in texts], self.config.max_ngram_size - 1)
        return np.concatenate([hasher(batch)[:, index].numpy() for batch in batches])

    def distinct(self, ids: np.ndarray, learnt: HotRows, layer: int, draw: np.random.Generator) -> Iterator[str]:
        """A table's lines: batches of consecutive tokens, and of single tokens from anywhere (decoding)."""
        level = np.zeros(self.config.num_embeddings[0], dtype=np.uint8)  # how many of the sizes hold the row
        for size in SIZES_GB:
            level[learnt.most(layer, self.rows(size)).numpy()] += 1
        for tokens in BATCHES:
            for way in ("consecutive", "scattered"):
                trials = min(200, len(ids) // tokens)
                total = np.zeros(1 + len(SIZES_GB))
                for trial in range(trials):
                    begin = trial * (len(ids) // trials)
                    place = (
                        slice(begin, begin + tokens) if way == "consecutive" else draw.integers(len(ids), size=tokens)
                    )
                    rows = np.unique(ids[place])
                    missed = [np.count_nonzero(level[rows] < len(SIZES_GB) - i) for i in range(len(SIZES_GB))]
                    total += np.array([rows.size, *missed])
                shares = total / (trials * tokens * ids.shape[1])
                yield f"| {tokens} | {way} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # shared cores: threads that wait for each other are slower than one
    draw = random.Random(options.seed)
    tokenizer = load_tokenizer(shipped_tokenizer())
    model = Model(TokenMap.from_tokenizer(tokenizer, 2))
    corpora = [read(f, options.tokens, draw, lambda text: list(tokenizer.encode(text).ids)) for f in options.folders]
    for folder, texts in zip(options.folders, corpora, strict=True):
        projects = len({text.project for text in texts})
        print(f"* {folder.name}: {sum(len(t.ids) for t in texts):,} tokens, {len(texts):,} files, {projects} projects")
    whole = [text for texts in corpora for text in texts]
    draw.shuffle(whole)
    learnt, measured = model.count(whole[::2], (1, 14)), model.count(whole[1::2], (1, 14))
    print("\n| learnt on | measured on | learnt | measured | 0.06 GB | 0.6 GB | 6 GB |\n|---|---|---|---|---|---|---|")
    for layer in (1, 14):
        print(f"| all, half of the files, layer {layer} | the other half | {model.served(learnt, measured, layer)} |")
    first, second = (model.count(half, [1]) for half in by_project(whole, draw))
    print(f"| all, half of the projects | other projects | {model.served(first, second, 1)} |")
    for texts in corpora:
        one, other = model.count(texts[::2], [1]), model.count(texts[1::2], [1])
        print(f"| {texts[0].corpus}, half of the files | the other half | {model.served(one, other, 1)} |")
        for others in corpora:
            if others is not texts:
                cells = model.served(model.count(texts, [1]), model.count(others, [1]), 1)
                print(f"| {texts[0].corpus} | {others[0].corpus} | {cells} |")
    print("\n| T | tokens | distinct | not in 0.06 GB | not in 0.6 GB | not in 6 GB |\n|---|---|---|---|---|---|")
    for line in model.distinct(model.hash_ids(whole[1::2], 1), learnt, 1, np.random.default_rng(options.seed)):
        print(line)
    if options.out is not None:
        save(options.out, whole[1::2], learnt.cut(model.rows(0.6)))


def save(out: Path, held: Sequence[Text], hot: HotRows) -> None:
    lengths = np.cumsum([0, *(len(text.ids) for text in held)])
    count = int(np.searchsorted(lengths, SAVED_TOKENS))
    ids = np.concatenate([np.asarray(text.ids, dtype=np.int32) for text in held[:count]])
    np.save(out / "real_tokens.npy", ids)
    np.save(out / "real_starts.npy", lengths[:count])
    hot.save(out / "hot_rows.safetensors")
    print(f"\n{out}: {ids.size:,} held-out tokens of {count} documents, {hot}")


if __name__ == "__main__":
    main()
