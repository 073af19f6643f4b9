"""A model of a few kilobytes and a vocabulary of a few words, for tests of the command line."""

from __future__ import annotations

from typing import Any

from engram_core.layout import table_rows

WORDS = ["<unk>", "the", "<pad>", "The", "THE", "lamp", "sea", "log", "book", "and", "again", "café", "cafe", "."]
COMPRESSED = 11  # the/The/THE are one, café/cafe are one


def hf_config(**changes: Any) -> dict[str, Any]:
    """A small model as a config.json holds it; a change to None takes the key away."""
    keys: dict[str, Any] = {
        "hidden_size": 64,
        "hc_mult": 4,
        "rms_norm_eps": 1e-20,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": list(table_rows(101, (1, 14), 3, 2)),
        "engram_vocab_size": 101,
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": COMPRESSED,
        "engram_pad_token_id": 2,
    }
    keys.update(changes)
    return {key: value for key, value in keys.items() if value is not None}
