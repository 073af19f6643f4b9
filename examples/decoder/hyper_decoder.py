"""A small decoder with four residual copies (hyper-connections), random weights, and a place for Engram in it.

Everything that a real decoder has and Engram touches: packed requests in one batch, a key-value cache for each request,
bf16 residual streams ``[T, H, dim]``. Nothing is trained: it writes noise, and a wrong memory changes the noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engram_core import EngramStep

HEADS = 4
SINKHORN_ROUNDS = 5


class KvCache:
    """Keys and values of one request, ``[layers, positions, heads, width]``; ``length`` positions of it are valid."""

    def __init__(self, layers: int, positions: int, dim: int, device: torch.device) -> None:
        shape = (layers, positions, HEADS, dim // HEADS)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        self.length = 0

    def reuse(self, other: KvCache, length: int) -> None:
        """Take the first ``length`` positions of a request that began with the same tokens."""
        self.keys[:, :length] = other.keys[:, :length]
        self.values[:, :length] = other.values[:, :length]
        self.length = length


class HyperConnection(nn.Module):
    """Collapses H residual copies to a block's input, and spreads its output over them again."""

    def __init__(self, copies: int, dim: int) -> None:
        super().__init__()
        self.copies = copies
        self.mix = nn.Linear(copies * dim, (2 + copies) * copies)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``streams`` ``[T, H, dim]`` to the block's input ``[T, dim]``, weights ``[T, H]`` and a mix ``[T, H, H]``."""
        h = self.copies
        weights = self.mix(F.rms_norm(streams.flatten(1), (streams.shape[1] * streams.shape[2],)))
        pre, post, comb = weights.split([h, h, h * h], dim=-1)
        comb = comb.view(-1, h, h).softmax(-1)
        for _ in range(SINKHORN_ROUNDS):  # doubly stochastic: no copy grows
            comb = comb / comb.sum(1, keepdim=True)
            comb = comb / comb.sum(2, keepdim=True)
        return (pre.sigmoid().unsqueeze(-1) * streams).sum(1), 2 * post.sigmoid(), comb


class Layer(nn.Module):
    """Attention and a feed-forward block, each between the residual copies of a :class:`HyperConnection`."""

    def __init__(self, index: int, copies: int, dim: int) -> None:
        super().__init__()
        self.index = index
        self.attention_copies, self.mlp_copies = HyperConnection(copies, dim), HyperConnection(copies, dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        streams = hidden.float()
        x, post, comb = self.attention_copies(streams)
        streams = comb @ streams + post.unsqueeze(-1) * self._attend(x, positions, spans).unsqueeze(1)
        x, post, comb = self.mlp_copies(streams)
        x = self.down(F.silu(self.up(F.rms_norm(x, (x.shape[-1],)))))
        mixed: torch.Tensor = comb @ streams + post.unsqueeze(-1) * x.unsqueeze(1)
        return mixed.to(hidden.dtype)

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (x.shape[-1],))).view(x.shape[0], 3, HEADS, -1).unbind(1)
        q, k = _rotate(q, positions), _rotate(k, positions)
        mixed = torch.zeros_like(q)  # tokens past the last request (padding) stay zero
        for cache, start, stop in spans:
            first, last = cache.length, cache.length + stop - start
            cache.keys[self.index, first:last], cache.values[self.index, first:last] = k[start:stop], v[start:stop]
            keys, values = cache.keys[self.index, :last], cache.values[self.index, :last]
            scores = torch.einsum("thd,shd->hts", q[start:stop], keys) * keys.shape[-1] ** -0.5
            ahead = torch.arange(last, device=x.device) > torch.arange(first, last, device=x.device)[:, None]
            weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
            mixed[start:stop] = torch.einsum("hts,shd->thd", weights, values)
        joined: torch.Tensor = self.out(mixed.flatten(1))
        return joined


Span = tuple[KvCache, int, int]
"""A request's cache, and where its tokens begin and end in the batch."""


class HyperDecoder(nn.Module):
    """``layers`` decoder layers over ``copies`` residual streams of ``dim``; weights depend on ``seed`` alone."""

    def __init__(self, vocabulary: int, layers: int, copies: int, dim: int, seed: int = 0) -> None:
        super().__init__()
        self.copies, self.dim = copies, dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, dim)
            self.layers = nn.ModuleList(Layer(index, copies, dim) for index in range(layers))
            self.head = nn.Linear(dim, vocabulary, bias=False)
        self.requires_grad_(False)

    def cache(self, positions: int) -> KvCache:
        """An empty cache for a request of at most so many tokens."""
        return KvCache(len(self.layers), positions, self.dim, self.head.weight.device)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span], step: EngramStep | None
    ) -> torch.Tensor:
        """Logits ``[T, vocabulary]`` of a packed batch; each span's cache grows. ``step``: None: no Engram."""
        hidden = self.embedding(ids).to(torch.bfloat16).unsqueeze(1).repeat(1, self.copies, 1)
        for index, layer in enumerate(self.layers):
            if step is not None:
                hidden = step.inject(index, hidden)  # before the attention; layers without Engram return it as it is
            hidden = layer(hidden, positions, spans)
        for cache, start, stop in spans:
            cache.length += stop - start
        logits: torch.Tensor = self.head(F.rms_norm(hidden.float().mean(1), (self.dim,)))
        return logits


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``[T, heads, width]``."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)
