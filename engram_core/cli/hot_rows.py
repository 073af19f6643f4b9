"""``engram-core hot-rows``: the rows that text looks up most, as a file from which a cache of them is filled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engram_core.cli.failure import CliError, bad_input

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engram_core.cli.corpus import Corpus, Document
    from engram_core.hot import HotRows
    from engram_core.hot_count import RowCounter

SIZES_GB: Final = (0.06, 0.6, 6.0)
"""Rows a layer, in 10**9 bytes, for which the share of look-ups served is estimated."""
_ROWS: Final = 25_000_000
# While counting, room for twice the rows that are written, and never for few: a row that is rare so far may become
# frequent. 10 million take 0.12 GB a layer, and as much again for the half that is held out.
_LEAST_KEPT: Final = 10_000_000


def hot_rows(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="UTF-8 text files, folders, or - (stdin).")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write; an old one is replaced.")],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="tokenizer.json; default: DeepSeek V4's (extra demo).")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="config.json with engram_* keys; default: V4.1-Flash.")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", min=0, metavar="N", help="Only this layer (may be repeated).")
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, max=10**9, metavar="N", help="At most this many rows a layer in the file.")
    ] = _ROWS,
    holdout: Annotated[
        bool, typer.Option(help="Estimate the share served: learn on every other document, measure on the rest.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data in place of text.")] = False,
) -> None:
    """Count the rows that a text looks up, and write the most frequent ones, made from all documents, to a file."""
    try:
        facts = _hot_rows(texts, out, tokenizer, config, layer or None, rows, holdout, quiet)
    except MemoryError:
        raise CliError("out of memory; pass smaller --rows, or one --layer at a time") from None
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def _hot_rows(
    texts: list[str],
    out: Path,
    tokenizer_path: str | None,
    config_path: str | None,
    layer_ids: list[int] | None,
    rows: int,
    holdout: bool,
    quiet: bool,
) -> dict[str, Any]:
    _check_out(out)
    from engram_core.cli import inputs
    from engram_core.cli.corpus import Corpus
    from engram_core.formats import packed_width
    from engram_core.hot_count import RowCounter

    corpus = Corpus.of(texts)
    if any(path is not None and out.exists() and out.samefile(path) for path in corpus.named):
        raise CliError(f"{out}: is one of the texts; --out needs another file")
    model = inputs.read_config(config_path, None, 16_000_000)
    inputs.check_rows(model, config_path)
    source, tokenizer, token_map = inputs.read_tokenizer(tokenizer_path, model)
    with bad_input("--layer" if layer_ids else ""):
        limit = max(2 * rows, _LEAST_KEPT)
        halves = [RowCounter(model, token_map, layer_ids, limit) for _ in range(2 if holdout else 1)]
    with _one_thread():
        documents = count_documents(corpus, tokenizer, halves, progress=not quiet)
    learnt = halves[0].result()
    if not learnt.tokens:
        raise CliError(f"{', '.join(texts)}: no text in {corpus.files} files; hot-rows needs some")
    width = packed_width(model.head_dim)
    measured = halves[1].result() if holdout and halves[1].tokens else None
    shares = {} if measured is None else _shares(learnt, measured, width, model.columns)
    for other in halves[1:]:
        halves[0].update(other)
    whole = halves[0].result()
    written = whole.cut(rows)
    with bad_input():
        written.save(out)
    return {
        "out": str(out),
        "bytes": out.stat().st_size,
        "fingerprint": written.fingerprint,
        "tokenizer": {"source": source, "fingerprint": token_map.fingerprint},
        "files": corpus.files,
        "skipped": [str(path) for path in corpus.skipped],
        "documents": documents,
        "tokens": written.tokens,
        "holdout": None if measured is None else {"learnt_tokens": learnt.tokens, "measured_tokens": measured.tokens},
        "layers": [
            {
                "layer_id": layer_id,
                "lookups": written.tokens * model.columns,
                "distinct_rows": whole.ids[layer_id].numel(),
                "dropped_rows": halves[0].dropped[layer_id],
                "written_rows": written.ids[layer_id].numel(),
                "served": shares.get(layer_id, []),
            }
            for layer_id in written.layer_ids
        ],
    }


def _check_out(out: Path) -> None:
    """Before hours of counting, not after."""
    if out.is_dir():
        raise CliError(f"{out}: is a folder; --out needs the name of a file")
    if not out.parent.is_dir():
        raise CliError(f"{out.parent}: no such folder; --out needs one that is there")
    if not os.access(out.parent, os.W_OK):
        raise CliError(f"{out.parent}: can't be written to; --out needs a folder that can")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Hashing is many small operations: on shared cores, threads that wait for each other made it 20 times slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def count_documents(corpus: Corpus, tokenizer: Tokenizer, counters: list[RowCounter], progress: bool) -> int:
    """Tokenise every document and give the first to the first counter, and so on in turn; return how many."""
    from engram_core.checkpoint.progress import byte_progress

    turn = count()
    number = 0
    with byte_progress("counting", corpus.nbytes, progress) as report:
        for documents in _batches(corpus):
            encoded = tokenizer.encode_batch_fast([document.content for document in documents])
            tokens = [encoding.ids for encoding in encoded if encoding.ids]
            for ids in tokens:
                counters[next(turn) % len(counters)].add_documents([ids])
            number += len(tokens)
            report(sum(document.nbytes for document in documents))
    return number


def _batches(corpus: Corpus) -> Iterator[list[Document]]:
    """Documents enough to keep all cores tokenising, few enough for their tokens to need little memory."""
    from engram_core.cli.corpus import PIECE_BYTES

    held: list[Document] = []
    for document in corpus.documents():
        held.append(document)
        if sum(other.nbytes for other in held) >= PIECE_BYTES:
            yield held
            held = []
    if held:
        yield held


def _shares(learnt: HotRows, measured: HotRows, width: int, columns: int) -> dict[int, list[dict[str, Any]]]:
    """For each layer and size: rows (fewer where not so many were seen), bytes, share of the look-ups served.

    Look-ups of rows that were dropped from ``measured`` count as not served: the true share may be larger.
    """
    found = {}
    for layer_id in learnt.layer_ids:
        entries: dict[int, dict[str, Any]] = {}
        for size in SIZES_GB:
            rows = min(int(size * 1e9) // width, learnt.ids[layer_id].numel())
            share = learnt.served(measured, layer_id, rows) / (measured.tokens * columns)
            entries[rows] = {"rows": rows, "bytes": rows * width, "share": share}
        found[layer_id] = list(entries.values())
    return found


def _print(facts: dict[str, Any]) -> None:
    skipped = f"; {len(facts['skipped']):,} files that are no UTF-8 text left out" if facts["skipped"] else ""
    print(f"{facts['tokens']:,} tokens of {facts['documents']:,} documents in {facts['files']:,} files{skipped}")
    for layer in facts["layers"]:
        at_least = "more than " if layer["dropped_rows"] else ""
        print(
            f"layer {layer['layer_id']}: {layer['lookups']:,} look-ups of {at_least}{layer['distinct_rows']:,} "
            f"distinct rows; {layer['written_rows']:,} written"
        )
    held = facts["holdout"]
    if held is None:
        print("no estimate of the share served: no document was held out")
    else:
        print(
            f"share of look-ups served, learnt on {held['learnt_tokens']:,} tokens, measured on "
            f"{held['measured_tokens']:,} of other documents:"
        )
        for layer in facts["layers"]:
            for entry in layer["served"]:
                print(
                    f"  layer {layer['layer_id']}: {entry['share']:6.1%} by {entry['rows']:,} rows "
                    f"({entry['bytes'] / 1e9:.2g} GB)"
                )
    print(f"{facts['out']}: {facts['bytes'] / 2**20:,.1f} MiB, fingerprint {facts['fingerprint'][:16]}")
