"""The judge of the main job: the conformance suite's float64 oracle, fed with weights drawn again from the seed.

Nothing that the backend holds is read back to make a reference. Hash ids and rows are judged for every token, as they
come; WKV and gate, gigaflops a token in float64, for some tokens, afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from engram_conformance import oracle
from numpy.typing import NDArray

from engram_core.cli.failure import CliError
from engram_core.formats import scale_bytes

if TYPE_CHECKING:
    from engram_core.backend import Wkv
    from engram_core.synthetic import Synthetic
    from engram_core.tokens import TokenMap

# float64 temporaries: 16 tokens of 4 x 5120 are 2.6 MB each, a few dozen of them; 128 tokens of 25600 are 26 MB.
_GATE_TOKENS: Final = 16
_WKV_TOKENS: Final = 128


@dataclass(frozen=True)
class Verdict:
    """One comparison. ``worst``: largest difference over its tolerance; ``tokens``: how many were compared."""

    name: str
    tokens: int
    worst: float
    passed: bool
    message: str


@dataclass(frozen=True)
class GateValues:
    """Statistics of the gate (0 shut, 1 open), from the oracle, over the checked tokens and all residual copies."""

    mean: float
    std: float
    min: float
    max: float
    tokens: int


@dataclass
class _Seen:
    ids: oracle.Check = field(default_factory=lambda: oracle.Check(0.0))
    rows: oracle.Check = field(default_factory=lambda: oracle.Check(0.0))
    whole: oracle.Check = field(default_factory=lambda: oracle.Check(0.0))
    whole_tokens: int = 0
    distinct: set[int] = field(default_factory=set)
    kept: list[tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint16]]] = field(default_factory=list)


def sample(tokens: int, wanted: int | None) -> NDArray[np.int64]:
    """``wanted`` positions of ``tokens``, evenly spaced, the first and the last among them; ``None``: all."""
    if wanted is None or wanted >= tokens:
        return np.arange(tokens)
    return np.unique(np.linspace(0, tokens - 1, wanted).round().astype(np.int64))


class Judge:
    """Collects what each layer made of each step, and compares it."""

    def __init__(
        self, synthetic: Synthetic, token_map: TokenMap, ids: Sequence[int], checked: NDArray[np.int64]
    ) -> None:
        config = synthetic.config
        self._synthetic = synthetic
        self._layers = {layer_id: index for index, layer_id in enumerate(config.layer_ids)}
        numbers = oracle.layout(
            config.vocab_size,
            config.layer_ids,
            config.max_ngram_size,
            config.n_heads,
            config.compressed_vocab_size,
        )
        # From the whole sequence at once, where the backend hashes it in chunks.
        self._ids = oracle.hash_sequence(numbers, token_map.ids.tolist(), token_map.pad_token_id, ids)
        self._checked = checked
        self._seen = {layer_id: _Seen() for layer_id in config.layer_ids}

    @property
    def tokens(self) -> int:
        return int(self._ids.shape[0])

    def check_layout(self, wkv: Wkv) -> None:
        """One process holds whole projections; anything else could not be compared."""
        if wkv.kv_layout != "full" or wkv.kv_features != wkv.spec.out_features:
            raise CliError(
                f"the backend's kv is {wkv.kv_layout!r}, {wkv.kv_features} wide, on one rank; 'full', "
                f"{wkv.spec.out_features} wide, is needed to compare it",
                1,
            )

    def see_rows(self, layer_id: int, start: int, ids: torch.Tensor, rows: torch.Tensor, staged: torch.Tensor) -> None:
        """``ids`` ``[T, C]``; ``rows`` ``[T, C, D]`` bf16; ``staged``: the same, or packed bytes ``[T, C, W]``."""
        seen = self._seen[layer_id]
        want = self._ids[start : start + ids.shape[0], self._layers[layer_id]]
        seen.ids = oracle.Check.worst_of(seen.ids, oracle.check_ids(ids.cpu().numpy(), want))
        distinct, place = np.unique(want, return_inverse=True)
        seen.distinct.update(distinct.tolist())
        packed = self._synthetic.rows_at(layer_id, distinct)
        place = place.reshape(want.shape)
        wanted_rows = oracle.decode_rows(packed)[place]
        found = [oracle.check_bits(_bits(rows), wanted_rows)]
        if staged.dtype == torch.uint8:
            found.append(oracle.check_ids(staged.cpu().numpy(), packed[place], "packed rows"))
        else:
            found.append(oracle.check_bits(_bits(staged), wanted_rows, "staged rows"))
        seen.rows = oracle.Check.worst_of(seen.rows, *found)

    def see_layer(self, layer_id: int, start: int, hidden: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Keep the checked tokens of what went into the gate and came out."""
        here = self._checked[(self._checked >= start) & (self._checked < start + hidden.shape[0])] - start
        place = torch.from_numpy(here).to(hidden.device)
        self._seen[layer_id].kept.append((_bits(hidden[place]), _bits(kv[place]), _bits(out[place])))

    def see_whole(self, layer_id: int, whole: torch.Tensor, out: torch.Tensor) -> None:
        """``whole``: what ``EngramStep.inject`` gave, its WKV run ahead; it must be ``out`` bit for bit."""
        self._seen[layer_id].whole = oracle.check_bits(_bits(whole), _bits(out), "inject")
        self._seen[layer_id].whole_tokens = int(out.shape[0])

    def distinct_rows(self, layer_id: int) -> int:
        """Different rows that the text touched."""
        return len(self._seen[layer_id].distinct)

    def judge(self, layer_id: int) -> tuple[list[Verdict], GateValues]:
        """Every comparison of a layer, in the order of the computation."""
        seen = self._seen[layer_id]
        hidden, kv, out = (np.concatenate(part) for part in zip(*seen.kept, strict=True))
        seen.kept.clear()
        wkv = self._wkv(layer_id, kv)
        gate, values = self._gate(layer_id, hidden, kv, out)
        checked = len(self._checked)
        verdicts = [
            _verdict("hash ids", self.tokens, seen.ids),
            _verdict("rows", self.tokens, seen.rows),
            _verdict("wkv", checked, wkv),
            _verdict("gate", checked, gate),
            _verdict("run ahead", seen.whole_tokens, seen.whole),
        ]
        return verdicts, values

    def _wkv(self, layer_id: int, kv: NDArray[np.uint16]) -> oracle.Check:
        codes, scales = self._synthetic.wkv(layer_id)
        weight = oracle.Weight(codes.view(torch.uint8).numpy(), scale_bytes(scales).numpy())
        worst = oracle.Check(0.0)
        for begin in range(0, len(kv), _WKV_TOKENS):
            tokens = self._checked[begin : begin + _WKV_TOKENS]
            ids = self._ids[tokens, self._layers[layer_id]]
            distinct, place = np.unique(ids, return_inverse=True)
            packed = self._synthetic.rows_at(layer_id, distinct)
            rows = oracle.bf16_to_f64(oracle.decode_rows(packed))[place.reshape(ids.shape)]
            ref, size = oracle.wkv(rows, weight)
            here = kv[begin : begin + _WKV_TOKENS]
            worst = oracle.Check.worst_of(worst, oracle.check_wkv(here, ref, size, weight.shape[1], random=True))
        return worst

    def _gate(
        self, layer_id: int, hidden: NDArray[np.uint16], kv: NDArray[np.uint16], out: NDArray[np.uint16]
    ) -> tuple[oracle.Check, GateValues]:
        q, k = (oracle.bf16_to_f64(_bits(weight)) for weight in self._synthetic.gate(layer_id))
        worst, gates = oracle.Check(0.0), []
        for begin in range(0, len(kv), _GATE_TOKENS):
            here = slice(begin, begin + _GATE_TOKENS)
            bounds = oracle.gate(
                oracle.bf16_to_f64(hidden[here]),
                oracle.bf16_to_f64(kv[here]),
                q,
                k,
                self._synthetic.config.rms_norm_eps,
            )
            worst = oracle.Check.worst_of(worst, oracle.check_gate(out[here], hidden[here], bounds, random=True))
            gates.append(bounds.gates)
        every = np.concatenate(gates)
        values = GateValues(float(every.mean()), float(every.std()), float(every.min()), float(every.max()), len(every))
        return worst, values


def _bits(x: torch.Tensor) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = x.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits


def _verdict(name: str, tokens: int, check: oracle.Check) -> Verdict:
    return Verdict(name, tokens, check.worst, check.passed, check.message)
