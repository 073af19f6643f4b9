"""Generate with Engram in a decoder, in every way an engine would, and show that all give the same tokens.

    python examples/decoder/generate.py [--backend NAME] [--device DEVICE]

Ends with 0 if every way of batching gave the tokens of the plain way, and with 1 otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from engine import Drafter, Engine, Request
from hyper_decoder import HyperDecoder

from engram_core import EngramConfig, EngramMemory, TokenBatch, TokenMap
from engram_core.layout import table_rows
from engram_core.synthetic import Synthetic

VOCABULARY = 300
LAYERS, ENGRAM_LAYERS = 4, (1, 2)
WANTED = 16
SEED = 1
"""Of the decoder: one with which no choice of a token is close."""
TOLERANCE = 0.01
"""Between logits of one token in two ways of batching: sums in another order, rounded to bf16 in each layer."""


def small_config(hidden_size: int = 256) -> EngramConfig:
    """V4.1's structure (2- to 4-grams, 4 copies), scaled down."""
    return EngramConfig(
        hidden_size=hidden_size,
        hc_mult=4,
        layer_ids=ENGRAM_LAYERS,
        num_embeddings=table_rows(1000, ENGRAM_LAYERS, 4, 4),
        vocab_size=1000,
        max_ngram_size=4,
        n_heads=4,
        head_dim=64,
        compressed_vocab_size=VOCABULARY,
        pad_token_id=2,
        rms_norm_eps=1e-20,
    )


def make_memory(backend: str | None, device: str | None, config: EngramConfig) -> EngramMemory:
    """All Engram layers of the decoder, with random tables."""
    token_map = TokenMap.identity(config.compressed_vocab_size, config.pad_token_id)
    memory = EngramMemory(config, token_map, backend, device=device, max_tokens=256)
    Synthetic(config).load(memory)
    return memory


def make_decoder(config: EngramConfig) -> HyperDecoder:
    """The decoder that goes with it."""
    return HyperDecoder(VOCABULARY, LAYERS, config.hc_mult, config.hidden_size, SEED)


def prompts() -> list[list[int]]:
    """Four prompts; the second and the third begin as the first does."""
    draw = torch.Generator().manual_seed(7)
    first, tail, other = (torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in (37, 9, 16))
    return [first, first[:29] + tail, [*first[:29], 5], other]


def drafter(plain: Sequence[Request]) -> Drafter:
    """A draft model that is often right: it knows what comes, and gets every fifth position wrong."""

    def draft(tokens: Sequence[int], most: int) -> list[int]:
        known = len(tokens)
        coming = next((request.tokens[known:] for request in plain if request.tokens[:known] == list(tokens)), [])
        wrong = {index for index in range(most) if (known + index) % 5 == 0}
        return [(t + 1) % VOCABULARY if i in wrong else t for i, t in enumerate(coming[:most])]

    return draft


@torch.inference_mode()
def recompute(decoder: HyperDecoder, memory: EngramMemory, prompt: Sequence[int], wanted: int) -> Request:
    """Without any cache or batch: the whole sequence again for every token."""
    request = Request(list(prompt), wanted, decoder.cache(1))
    for _ in range(wanted):
        batch = TokenBatch.single(torch.tensor(request.tokens)).to(memory.backend.device)
        cache = decoder.cache(len(request.tokens))
        with memory.step(batch) as step:
            logits = decoder(batch.input_ids, batch.positions, [(cache, 0, len(batch))], step)
        request.logits.append(logits[-1].float().cpu())
        request.tokens.append(int(request.logits[-1].argmax()))
    return request


@dataclass(frozen=True)
class Outcome:
    """One way of running, against the plain way."""

    name: str
    equal: bool
    worst: float
    note: str


def compare(decoder: HyperDecoder, memory: EngramMemory) -> tuple[list[Request], list[Outcome]]:
    """Generate in every way; the first list is the plain way's requests."""
    plain = [recompute(decoder, memory, prompt, WANTED) for prompt in prompts()]
    draft = drafter(plain)
    ways = {
        "one request at a time": Engine(decoder, memory),
        "several requests": Engine(decoder, memory),
        "chunked prefill": Engine(decoder, memory, chunk=5),
        "prefix reuse": Engine(decoder, memory, reuse=True),
        "speculation": Engine(decoder, memory, speculate=3, drafter=draft),
        "padded batches": Engine(decoder, memory, pad_to=16),
        "all together": Engine(decoder, memory, 7, 3, draft, 16, True),
    }
    outcomes = []
    for name, engine in ways.items():
        requests = []
        for prompt in prompts():
            requests.append(engine.add(prompt, WANTED))
            if name in ("one request at a time", "prefix reuse"):
                engine.run()
            elif name == "all together":  # it arrives while the others are being generated
                for _ in range(7):
                    engine.step([request for request in engine.requests if not request.done])
        engine.run()
        outcomes.append(_outcome(name, engine, requests, plain))
    return plain, outcomes


def _outcome(name: str, engine: Engine, requests: Sequence[Request], plain: Sequence[Request]) -> Outcome:
    equal = [request.tokens for request in requests] == [request.tokens for request in plain]
    worst = max(
        float((a - b).abs().max())
        for request, other in zip(requests, plain, strict=True)
        for a, b in zip(request.logits, other.logits, strict=True)
    )
    accepted, refused = (sum(getattr(request, key) for request in requests) for key in ("accepted", "refused"))
    notes = [f"{engine.steps} steps"]
    notes += [f"{engine.reused} tokens reused"] if engine.reused else []
    notes += [f"{accepted} drafts kept, {refused} taken back"] if engine.speculate else []
    return Outcome(name, equal, worst, ", ".join(notes))


def margin(requests: Sequence[Request]) -> float:
    """The smallest distance between the best and the second logit: what a difference must exceed to change a token."""
    tops = torch.stack([row.topk(2).values for request in requests for row in request.logits])
    return float((tops[:, 0] - tops[:, 1]).min())


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each way; 0 if all gave the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="default: ENGRAM_BACKEND, or the best that is available")
    parser.add_argument("--device", help="a torch device; default: the backend's")
    options = parser.parse_args(argv)
    config = small_config()
    memory = make_memory(options.backend, options.device, config)
    decoder = make_decoder(config).to(memory.backend.device)
    plain, outcomes = compare(decoder, memory)
    tokens = sum(len(request.logits) for request in plain)
    print(f"{tokens} tokens of {len(plain)} requests on {memory.backend.info.name} ({memory.backend.device})")
    print(f"plain: every token recomputed; smallest margin of a choice {margin(plain):.3f}")
    for outcome in outcomes:
        verdict = "same tokens" if outcome.equal else "OTHER TOKENS"
        print(f"  {outcome.name:<22} {verdict}, logits within {outcome.worst:.4f}  ({outcome.note})")
    without = Engine(decoder, None)
    bare = [without.add(prompt, WANTED) for prompt in prompts()]
    without.run()
    changed = sum(
        a != b for request, other in zip(bare, plain, strict=True)
        for a, b in zip(request.tokens, other.tokens, strict=True)
    )  # fmt: skip
    print(f"without Engram {changed} of the {tokens} tokens are others")
    good = changed > 0 and all(outcome.equal and outcome.worst <= TOLERANCE for outcome in outcomes)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
