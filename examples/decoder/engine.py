"""A scheduler as serving engines have one, as small as it can be, and what it must hand to Engram each step.

Chunked prefill, several requests in a batch, prefix reuse, speculative tokens that are taken back, and padding to a few
batch sizes, as captured graphs need it. Of all these Engram sees one thing: for each request the tokens of this step
and the few before them, wherever those came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from hyper_decoder import HyperDecoder, KvCache

from engram_core import EngramMemory, TokenBatch

Drafter = Callable[[Sequence[int], int], list[int]]
"""Guesses the next tokens of a sequence: at most so many."""


@dataclass(eq=False)
class Request:
    """``tokens``: the prompt, then what was generated; ``wanted``: how many tokens to generate."""

    tokens: list[int]
    wanted: int
    cache: KvCache
    drafts: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """Of each generated token, the logits that it was taken from."""
    accepted: int = 0
    refused: int = 0

    @property
    def done(self) -> bool:
        return len(self.logits) == self.wanted


@dataclass
class Engine:
    """``chunk``: prefill tokens of a request and step; ``speculate``: drafts a step; ``pad_to``: batches are multiples.

    ``reuse``: take the cache of a request with the same beginning. ``memory``: None: without Engram.
    """

    decoder: HyperDecoder
    memory: EngramMemory | None
    chunk: int = 10**9
    speculate: int = 0
    drafter: Drafter | None = None
    pad_to: int = 1
    reuse: bool = False
    requests: list[Request] = field(default_factory=list)
    steps: int = 0
    reused: int = 0

    def add(self, prompt: Sequence[int], wanted: int) -> Request:
        """Take a request; with ``reuse``, tokens that another request has computed are not computed again."""
        request = Request(list(prompt), wanted, self.decoder.cache(len(prompt) + wanted + self.speculate))
        if self.reuse and self.requests:
            best = max(self.requests, key=lambda other: _common(other, prompt))
            shared = min(_common(best, prompt), len(prompt) - 1)  # one token must run, to give logits
            request.cache.reuse(best.cache, shared)
            self.reused += shared
        self.requests.append(request)
        return request

    def run(self) -> None:
        """Step until every request is done."""
        while waiting := [request for request in self.requests if not request.done]:
            self.step(waiting)

    @torch.inference_mode()
    def step(self, requests: Sequence[Request]) -> None:
        """One forward pass over the next tokens of all ``requests``."""
        parts = [self._next(request) for request in requests]
        device = self.decoder.head.weight.device
        host = self._batch(requests, parts)
        batch = host.to(device)
        starts = host.query_start.tolist()
        spans = [(request.cache, a, b) for request, a, b in zip(requests, starts, starts[1:], strict=False)]
        if self.memory is None:
            logits = self.decoder(batch.input_ids, batch.positions, spans, None)
        else:
            with self.memory.step(batch) as step:
                logits = self.decoder(batch.input_ids, batch.positions, spans, step)
        self.steps += 1
        for request, (_, start, stop) in zip(requests, spans, strict=True):
            self._take(request, logits[start:stop].float().cpu())

    def _next(self, request: Request) -> list[int]:
        """The tokens that this request runs now: a chunk of its prompt, or its last token and some drafts."""
        known = request.tokens[request.cache.length :]
        request.drafts = []
        if len(known) > 1 or not self.speculate or self.drafter is None:
            return known[: self.chunk]
        room = min(self.speculate, request.wanted - len(request.logits) - 1)
        request.drafts = self.drafter(request.tokens, room)[:room]
        return known + request.drafts

    def _batch(self, requests: Sequence[Request], parts: Sequence[Sequence[int]]) -> TokenBatch:
        """What Engram needs: the packed tokens, where each request begins, and what came before its chunk.

        The lookback is read from the request's own tokens. So it is right after a chunk, after a reused prefix (which
        this engine never ran), and after drafts were taken back (which are not among them).
        """
        width = 3 if self.memory is None else self.memory.layout.max_ngram_size - 1
        ids: list[int] = []
        positions: list[int] = []
        starts, lookback = [0], []
        for request, part in zip(requests, parts, strict=True):
            first = request.cache.length
            ids += part
            positions += range(first, first + len(part))
            starts.append(len(ids))
            lookback.append([request.tokens[first - 1 - s] if first - 1 - s >= 0 else -1 for s in range(width)])
        padding = -len(ids) % self.pad_to  # past query_start[-1]: the hasher gives these the id -1
        ids += [0] * padding
        positions += range(padding)
        packed, places, bounds = (torch.tensor(x, dtype=torch.int32) for x in (ids, positions, starts))
        return TokenBatch(packed, places, bounds, torch.tensor(lookback, dtype=torch.int32))

    def _take(self, request: Request, logits: torch.Tensor) -> None:
        """Append what the logits say; take back drafts that they do not confirm."""
        known = len(request.tokens)
        if request.cache.length < known:  # in the middle of a prompt
            return
        # The last known token's logits, then one row for each draft.
        rows = logits[len(logits) - 1 - len(request.drafts) :]
        for index, row in enumerate(rows):
            token = int(row.argmax())
            request.tokens.append(token)
            request.logits.append(row)
            if index == len(request.drafts) or token != request.drafts[index]:
                break
            request.accepted += 1
        request.refused += len(request.drafts) - (len(request.tokens) - known - 1)
        # The last token was never run; positions of refused drafts are written over.
        request.cache.length = len(request.tokens) - 1


def _common(request: Request, prompt: Sequence[int]) -> int:
    """Tokens at the beginning of ``prompt`` that ``request`` has run."""
    for index, (a, b) in enumerate(zip(request.tokens[: request.cache.length], prompt, strict=False)):
        if a != b:
            return index
    return min(request.cache.length, len(prompt))
