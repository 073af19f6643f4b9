"""``engram-core inspect``: what Engram a checkpoint or a folder of packed tables has, and what it needs to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engram_core.cli.failure import CliError, bad_input

if TYPE_CHECKING:
    from engram_core.checkpoint import Checkpoint, LayerTensors, PackedFile

_MAX_TOKENS: Final = 8192


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder or file, or what engram-core pack made.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read packed tables whole and compare checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data in place of text.")] = False,
) -> None:
    """Show the Engram layers of a checkpoint, its token map's fingerprint, and the memory that it needs."""
    facts: dict[str, Any]
    with bad_input():
        packed = _packed(path)
        if packed:
            facts = {"path": str(path), "packed": [_packed_facts(file, verify) for file in packed]}
        elif verify:
            raise CliError(f"{path}: holds no packed tables (engram-layer-N.rows); --verify compares their checksums")
        else:
            facts = _checkpoint_facts(path)
    if as_json:
        print(json.dumps(facts, indent=2))
    elif packed:
        _print_packed(facts)
    else:
        _print_checkpoint(facts)
    damaged = any(entry["damaged_chunks"] for entry in facts.get("packed", ()))
    other_tokens = (facts.get("token_map") or {"fits": True})["fits"] is False
    raise typer.Exit(1 if damaged or other_tokens else 0)


def _packed(path: Path) -> list[PackedFile]:
    from engram_core.checkpoint import PackedFile

    found = sorted(path.glob("engram-layer-*.rows")) if path.is_dir() else [path] if path.suffix == ".rows" else []
    return [PackedFile.open(file) for file in found]


def _packed_facts(file: PackedFile, verify: bool) -> dict[str, Any]:
    from engram_core.checkpoint.progress import byte_progress

    damaged = None
    if verify:
        with byte_progress(f"reading {file.path.name}", file.nbytes) as report:
            damaged = file.damaged(report)
    return {
        "file": str(file.path),
        "layer_id": file.layer_id,
        "rows": file.rows,
        "head_dim": file.head_dim,
        "bytes": file.nbytes,
        "fingerprint": file.fingerprint,
        "source": file.source,
        "verified": verify,
        "damaged_chunks": damaged,
    }


def _checkpoint_facts(path: Path) -> dict[str, Any]:
    from engram_core.checkpoint import Checkpoint
    from engram_core.checkpoint.sizes import staging_bytes, table_needs, weight_bytes

    checkpoint = Checkpoint.open(path)
    layers = checkpoint.layers()
    config = checkpoint.config
    needs = table_needs(config, layers)
    return {
        "path": str(path),
        "config": config.model_dump(mode="json"),
        "layers": [_layer_facts(tensors) for tensors in layers.values()],
        "token_map": _token_map_facts(checkpoint),
        "memory": {
            "tables": [vars(need) for need in needs],
            "weights_each_rank": weight_bytes(layers.values()),
            "staging_each_rank": staging_bytes(config, len(layers), _MAX_TOKENS),
            "staging_max_tokens": _MAX_TOKENS,
        },
    }


def _layer_facts(tensors: LayerTensors) -> dict[str, Any]:
    assert tensors.codes is not None  # asked for with its table
    return {
        "layer_id": tensors.layer_id,
        "rows": tensors.codes.shape[0],
        "head_dim": tensors.codes.shape[1],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "file": tensor.file.name,
            }
            for tensor in tensors.all
        ],
    }


def _token_map_facts(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """None without a tokenizer.json; ``fits``: whether its size is the configuration's."""
    from engram_core.tokens import TokenMap

    source = checkpoint.folder / "tokenizer.json"
    if not source.is_file():
        return None
    held = TokenMap.from_tokenizer(source, checkpoint.config.pad_token_id)
    return {
        "ids": len(held),
        "size": held.size,
        "pad_id": held.pad_id,
        "fingerprint": held.fingerprint,
        "fits": held.size == checkpoint.config.compressed_vocab_size,
    }


def _print_packed(facts: dict[str, Any]) -> None:
    for entry in facts["packed"]:
        print(f"{entry['file']}: layer {entry['layer_id']}, {entry['rows']:,} rows of {entry['head_dim']} values")
        print(f"  {_size(entry['bytes'])}, fingerprint {entry['fingerprint']}")
        if entry["verified"]:
            bad = entry["damaged_chunks"]
            print(f"  DAMAGED: chunks {bad} differ from their checksums" if bad else "  every chunk as it was written")


def _print_checkpoint(facts: dict[str, Any]) -> None:
    config, memory = facts["config"], facts["memory"]
    print(facts["path"])
    print(
        f"  {len(facts['layers'])} Engram layers of hidden size {config['hidden_size']} x {config['hc_mult']} copies; "
        f"{config['n_heads']} heads for 2- to {config['max_ngram_size']}-grams, rows of {config['head_dim']} values"
    )
    for layer in facts["layers"]:
        print(f"\nlayer {layer['layer_id']}: {layer['rows']:,} rows")
        for tensor in layer["tensors"]:
            shape = " x ".join(f"{n:,}" for n in tensor["shape"])
            place = f"{_size(tensor['bytes']):>10}  {tensor['file']}"
            print(f"  {tensor['name']:<48} {tensor['dtype']:<8} {shape:<18} {place}")
    held = facts["token_map"]
    print("\ntoken map")
    if held is None:
        print("  no tokenizer.json in this folder: pass token_map to from_pretrained")
    else:
        fits = "as configured" if held["fits"] else f"DIFFERENT from the configured {config['compressed_vocab_size']:,}"
        print(f"  {held['ids']:,} ids -> {held['size']:,} ({fits}), fingerprint {held['fingerprint']}")
    print("\nmemory for tables, by placement and tensor ranks of one node")
    print(f"  {'ranks':>5} {'device: each':>14} {'host: node':>14} {'shared: node':>14} {'file: disk':>14}")
    for ranks in dict.fromkeys(need["ranks"] for need in memory["tables"]):
        needs = {need["placement"]: need for need in memory["tables"] if need["ranks"] == ranks}
        sizes = (needs["device"]["device"], needs["host"]["host"], needs["shared"]["host"], needs["file"]["file"])
        print(f"  {ranks:>5} " + " ".join(f"{_size(size):>14}" for size in sizes))
    print(
        f"beside them on each device: weights {_size(memory['weights_each_rank'])} as stored, rows in flight "
        f"{_size(memory['staging_each_rank'])} at max_tokens={memory['staging_max_tokens']}"
    )


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"
