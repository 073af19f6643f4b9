"""Tiny models for tests: real arithmetic, small geometry."""

from __future__ import annotations

from typing import Any

import torch

from engram_core import EngramConfig, EngramMemory
from engram_core.formats import quantize_mxfp8
from engram_core.layout import table_rows


def tiny_config(**changes: Any) -> EngramConfig:
    """The golden tiny geometry (layers 1 and 14, n = 3, 2 heads) with a small hidden size."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "hc_mult": 4,
        "layer_ids": (1, 14),
        "vocab_size": 11,
        "max_ngram_size": 3,
        "n_heads": 2,
        "head_dim": 32,
        "compressed_vocab_size": 64,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-20,
    }
    values.update(changes)
    rows = table_rows(values["vocab_size"], values["layer_ids"], values["max_ngram_size"], values["n_heads"])
    return EngramConfig(**{"num_embeddings": rows, **values})


def weights(config: EngramConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors under DeepSeek-V4.1's names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer_id, rows in zip(config.layer_ids, config.num_embeddings, strict=True):
        name = f"layers.{layer_id}.engram."
        codes, scale = quantize_mxfp8(torch.randn(rows, config.head_dim, generator=generator))
        found[name + "embed.weight"], found[name + "embed.scale"] = codes, scale.view(torch.float8_e8m0fnu)
        shape = (config.wkv_out_features, config.wkv_in_features)
        blocks = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        codes, _ = quantize_mxfp8(blocks * 2**8)
        found[name + "wkv.weight"] = codes
        found[name + "wkv.scale"] = torch.full((shape[0] // 32, shape[1] // 32), 119, dtype=torch.uint8)
        for part in "qk":
            gate = 1 + 0.1 * torch.randn(config.hc_mult, config.hidden_size, generator=generator)
            found[f"{name}{part}_weight"] = gate.to(torch.bfloat16)
    return found


def filled(memory: EngramMemory, seed: int = 0) -> EngramMemory:
    """The memory with :func:`weights` loaded."""
    memory.load_weights(weights(memory.config, seed).items())
    return memory
