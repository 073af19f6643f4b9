"""Engram inside a model that none of us wrote: ``deepseek_v4`` of transformers, through forward hooks alone.

    pip install "transformers>=5.24"
    python examples/decoder/deepseek_v4.py [--backend NAME] [--device DEVICE]

The model (four hyper-connection copies, three kinds of attention with compressed caches, mixture of experts) has no
Engram. A tiny one with random weights is built, and Engram is put before the attention of two of its layers; its own
``generate`` with its own cache must give the tokens that a recomputation of the whole sequence gives for each of them.

Sequences of one length: padded on the left, this model without Engram already gives other logits with its cache than
without it (transformers 5.24.0). The hooks take padding all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from generate import make_memory, small_config
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from engram_core import EngramMemory, EngramStep, TokenBatch

PAD = 0
WANTED = 24
SEED = 5
"""Of the model: one with which no choice of a token is close."""
TOLERANCE = 0.02
"""Between logits with the cache and without it: sums in another order."""


class EngramHooks:
    """Engram in a transformers decoder: what its forward pass sees is enough.

    Three hooks: before the model a step begins, before each Engram layer its memory enters the residual copies, after
    the model the step ends. The client's cache holds no token ids, so the few before a chunk are kept here.
    ``pad_token_id``: of padding on the left, which takes part in no n-gram.
    """

    def __init__(
        self, memory: EngramMemory, decoder: nn.Module, layers: Sequence[nn.Module], pad_token_id: int
    ) -> None:
        self.memory = memory
        self.pad_token_id = pad_token_id
        self._width = memory.layout.max_ngram_size - 1
        self._step: EngramStep | None = None
        self._seen = 0
        self._lookback = torch.empty(0)
        self._handles = [
            decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            decoder.register_forward_hook(self._end, always_call=True),
            *(layers[i].register_forward_pre_hook(self._injector(i)) for i in memory.layers),
        ]

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: torch.Tensor = kwargs["input_ids"]  # [B, S]
        cache = kwargs.get("cache")
        seen = 0 if cache is None else int(cache.get_seq_length())
        if seen == 0:
            self._lookback = ids.new_full((ids.shape[0], self._width), -1)
        elif seen != self._seen:
            raise RuntimeError(f"the cache holds {seen} tokens; {self._seen} were seen here: hook the model before")
        rows, width = ids.shape
        dead = ids == self.pad_token_id
        batch = TokenBatch(
            input_ids=ids.flatten(),
            positions=torch.arange(seen, seen + width, device=ids.device).repeat(rows),
            query_start=torch.arange(rows + 1, device=ids.device) * width,
            lookback=self._lookback,
            dead=dead.flatten(),
        )
        known = torch.cat([ids.masked_fill(dead, -1).flip(1), self._lookback], dim=1)  # newest first
        self._lookback, self._seen = known[:, : self._width], seen + width
        self._step = self.memory.step(batch)
        self._step.start()

    def _end(self, *_: object) -> None:
        if self._step is not None:
            self._step.end()
            self._step = None

    def _injector(self, layer_id: int) -> Any:
        def inject(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden = args[0]  # [B, S, H, dim]
            assert self._step is not None
            streams = hidden.flatten(0, 1).to(torch.bfloat16)
            return self._step.inject(layer_id, streams).view(hidden.shape).to(hidden.dtype), *args[1:]

        return inject


def make_model(vocabulary: int, hidden_size: int, seed: int = SEED) -> DeepseekV4ForCausalLM:
    """Four layers, one of each kind of attention, hashed and learned routing, random weights of order 1."""
    config = DeepseekV4Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        num_experts_per_tok=4,  # all of them: where two are nearly equal, a last bit would choose another one
        n_routed_experts=4,
        n_shared_experts=1,
        max_position_embeddings=256,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        hc_mult=4,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=64,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.1,
        partial_rotary_factor=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(config)
    model.train(False)
    return model


@torch.inference_mode()
def generate(model: DeepseekV4ForCausalLM, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The client's own ``generate`` with its cache: tokens ``[B, S + WANTED]`` and logits ``[B, WANTED, V]``."""
    found = model.generate(
        prompt,
        attention_mask=(prompt != PAD).long(),
        max_new_tokens=WANTED,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences, torch.stack(found.logits, dim=1)


@torch.inference_mode()
def recompute(model: DeepseekV4ForCausalLM, tokens: torch.Tensor, generated: int) -> torch.Tensor:
    """The logits of the last ``generated`` tokens, each from the whole sequence before it, without a cache."""
    found = []
    for end in range(tokens.shape[1] - generated, tokens.shape[1]):
        before = tokens[:, :end]
        real = (before != PAD).long()
        positions = (real.cumsum(-1) - 1).clamp_min(0)  # as generate counts them
        outcome = model(before, attention_mask=real, position_ids=positions, use_cache=False, logits_to_keep=1)
        found.append(outcome.logits[:, -1])
    return torch.stack(found, dim=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; 0 if generation with the cache is what recomputation gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="default: ENGRAM_BACKEND, or the best that is available")
    parser.add_argument("--device", help="a torch device; default: the backend's")
    options = parser.parse_args(argv)
    config = small_config()
    memory = make_memory(options.backend, options.device, config)
    model = make_model(config.compressed_vocab_size, config.hidden_size).to(memory.backend.device)
    draw = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, config.compressed_vocab_size, (2, 30), generator=draw)
    prompt = prompt.to(memory.backend.device)

    bare, _ = generate(model, prompt)
    hooks = EngramHooks(memory, model.model, model.model.layers, PAD)
    tokens, logits = generate(model, prompt)
    again = recompute(model, tokens, WANTED)
    hooks.remove()
    gone, _ = generate(model, prompt)

    worst = float((logits - again).abs().max())
    tops = again.topk(2).values
    same = torch.equal(again.argmax(-1), tokens[:, -WANTED:])
    changed = int((bare != tokens).sum())
    print(f"deepseek_v4 with Engram before layers {list(memory.layers)} on {memory.backend.info.name}")
    print(f"  {tokens.shape[0]} sequences, {WANTED} tokens each, generated with the model's own cache")
    print(f"  recomputed without it: {'same tokens' if same else 'OTHER TOKENS'}, logits within {worst:.4f}")
    print(f"  smallest margin of a choice {float((tops[..., 0] - tops[..., 1]).min()):.4f}")
    print(f"  without Engram {changed} of the {tokens.shape[0] * WANTED} tokens are others")
    good = same and worst <= TOLERANCE and changed > 0 and torch.equal(gone, bare)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
