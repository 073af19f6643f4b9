"""The judge: what CONTRACT says, in NumPy float64, written apart from every backend and from ``engram_core``.

Only numpy and the standard library are imported, so that a fault shared with the core's own arithmetic can't hide here.
bf16 tensors come in and go out as their bits (uint16); everything else is float64. Each ``check_*`` returns a
:class:`Check`: the worst error as a multiple of its tolerance (at most 1 passes), where it is, and a sentence.

* hash: :func:`layout` (primes, offsets, multipliers), :func:`hash_ids` (a packed batch), :func:`hash_sequence`,
  :func:`check_ids`
* rows: :func:`decode_rows`, :func:`lookup_rows`, :func:`check_bits`
* WKV: :class:`Weight` (strips of a checkpoint's weight), :func:`wkv`, :func:`check_wkv`
* gate: :func:`gate`, :func:`check_gate`
* a whole layer: :func:`layer`, to be judged with :func:`check_gate`
"""

from engram_conformance.oracle.check import Check, check_bits, check_ids
from engram_conformance.oracle.gate import GateBounds, check_gate, gate, layer
from engram_conformance.oracle.hashing import LayoutNumbers, hash_ids, hash_sequence, layout
from engram_conformance.oracle.numbers import (
    bf16_to_f64,
    bf16_ulp,
    decode_e4m3fn,
    decode_e8m0,
    decode_rows,
    lookup_rows,
    to_bf16,
)
from engram_conformance.oracle.wkv import Weight, check_wkv, wkv

__all__ = [
    "Check",
    "GateBounds",
    "LayoutNumbers",
    "Weight",
    "bf16_to_f64",
    "bf16_ulp",
    "check_bits",
    "check_gate",
    "check_ids",
    "check_wkv",
    "decode_e4m3fn",
    "decode_e8m0",
    "decode_rows",
    "gate",
    "hash_ids",
    "hash_sequence",
    "layer",
    "layout",
    "lookup_rows",
    "to_bf16",
    "wkv",
]
