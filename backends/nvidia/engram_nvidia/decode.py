"""e4m3fn weights to bf16 in registers, two codes in a register at a time.

``b & 0x7f`` moved to bits 10..4 of a bf16 is the code's value times 2**-120, for subnormal codes too, and ``b & 0x80``
its sign; one bf16 product with ``2**(scale - 127 + 120)`` gives the exact weight. Words of four codes are stored with
their bits spread (``weights.spread``) so that the first two are there under a mask, and the other two under two shifts
and a mask: five integer operations and two products for four codes, where Triton's own conversion takes one code at a
time through fp16 and float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engram_core.kernels.lookup import decode_e8m0

# 0x87F087F0, 0x80F080F0 as int32.
_FIRST = tl.constexpr(0x87F087F0 - 2**32)
_LOW = tl.constexpr(0x80F080F0 - 2**32)
_HIGH = tl.constexpr(0x07000700)


@triton.jit
def _halves(pair):
    """The two bf16 in an int32, in a new last dimension."""
    first = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
    second = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(first, second)


@triton.jit
def shifted_codes(word):
    """Codes times 2**-120, bf16 ``[..., e, r]``, of spread words ``[...]`` int32."""
    first = word & _FIRST
    second = ((word << 4) & _LOW) | ((word >> 4) & _HIGH)
    return tl.join(_halves(first), _halves(second))


@triton.jit
def scaled(shifted, scale, FAST: tl.constexpr, SETTLE: tl.constexpr):
    """bf16 weights of shifted codes and scale bytes of broadcastable shapes.

    FAST: two products an instruction, for weights without NaN codes and scale bytes up to 134 (``PackedWeight.fast``).
    Otherwise the definition, which also runs through the interpreter: float32 products and one rounding. SETTLE: not
    before the matrix products in flight are done (Hopper only).
    """
    if FAST:
        byte = scale.to(tl.int32)
        if SETTLE:
            byte = _settled(byte)
        factor = ((byte + 120) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        # fma with -0.0 and not mul, which needs sm_90: the same value, the sign of zero included.
        weight = tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
            "=r,r,r",
            [shifted, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        value = shifted.to(tl.float32) * 1329227995784915872903807060280344576.0  # 2**120
        nan = (shifted.to(tl.int16, bitcast=True) & 0x7FFF) == 0x07F0
        weight = (tl.where(nan, float("nan"), value) * decode_e8m0(scale)).to(tl.bfloat16)
    return weight


@triton.jit
def _settled(value):
    """``value`` (int32, loaded in this step), once no matrix product of this warp group is in flight.

    Hopper's products read a left operand in registers while they run. Triton 3.6 computes the next step's operand in
    the same registers without waiting (seen on an H200: up to 30 % wrong elements at tiles of 128 x 128 on 8 warps, all
    right with the wait), so the wait is made here and what is written to those registers depends on it. Declared pure,
    since a side effect would keep the layout of the operand from reaching the load: the value keeps it after this
    step's loads, and those follow the step before.
    """
    return tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1
    )
