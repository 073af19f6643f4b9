"""``engram-core pack``: a checkpoint's tables as the files that placement "file" maps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram_core.cli.failure import bad_input


def pack(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or its single model.safetensors.")],
    out: Annotated[Path, typer.Argument(help="The folder for engram-layer-N.rows; made if it is not there.")],
    layer: Annotated[
        list[int] | None, typer.Option("--layer", min=0, metavar="N", help="Only this layer (may be repeated).")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Write each layer's table as packed rows; an interrupted run goes on where it was when it is started again."""
    with bad_input():
        from engram_core.checkpoint import Checkpoint, pack_table

        for layer_id, tensors in Checkpoint.open(path).layers(layer or None).items():
            packed = pack_table(tensors, out, progress=not quiet)
            print(
                f"layer {layer_id}: {packed.rows:,} rows of {packed.width} bytes in {packed.path}, fingerprint "
                f"{packed.fingerprint[:16]}"
            )
    print(f'use: EngramMemory.from_pretrained({str(path)!r}, placement="file", table_path={str(out)!r})')
