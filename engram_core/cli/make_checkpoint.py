"""``engram-core make-checkpoint``: a small checkpoint in the real format, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from engram_core.cli.failure import bad_input

if TYPE_CHECKING:
    from engram_core.config import EngramConfig

# 12.7 MB a table and 3.1 MB a projection: enough to be real, quick to make.
_VOCAB_SIZE: Final = 2000
_HIDDEN_SIZE: Final = 512


def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="The folder to make; it must not be there yet.")],
    vocab_size: Annotated[
        int, typer.Option(min=2, max=2**32, metavar="N", help="engram_vocab_size: tables have about 24 N rows.")
    ] = _VOCAB_SIZE,
    hidden_size: Annotated[
        int, typer.Option(min=1, max=2**20, metavar="N", help="Width of a residual stream (V4.1-Flash: 5120).")
    ] = _HIDDEN_SIZE,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="tokenizer.json to put in; default: DeepSeek V4's, of the extra demo."),
    ] = None,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="Put no tokenizer.json in.")] = False,
    converted: Annotated[bool, typer.Option("--converted", help="Names as common converters write them.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random weights.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Write a checkpoint as DeepSeek-V4.1 is written, geometry scaled down, weights random."""
    with bad_input():
        from engram_core.checkpoint import write_checkpoint
        from engram_core.config import EngramConfig

        published = EngramConfig.deepseek_v41(vocab_size)
        config = EngramConfig(**{**published.model_dump(), "hidden_size": hidden_size})
        source = None if no_tokenizer else _tokenizer(tokenizer, config)
        folder = write_checkpoint(out, config, seed, tokenizer=source, converted=converted, progress=not quiet)
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    print(f"{folder}: {len(shards)} shards, {sum(shards) / 2**20:,.1f} MiB; engram-core inspect shows what is in it")


def _tokenizer(path: Path | None, config: EngramConfig) -> Path:
    """The file, once its map is known to be the configuration's."""
    from engram_core.cli.inputs import shipped_tokenizer
    from engram_core.hashing import check_token_map
    from engram_core.tokens import TokenMap

    source = shipped_tokenizer() if path is None else path / "tokenizer.json" if path.is_dir() else path
    with bad_input(str(source)):
        check_token_map(config, TokenMap.from_tokenizer(source, config.pad_token_id))
    return source
