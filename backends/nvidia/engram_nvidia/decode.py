"""e4m3fn weights to bf16 in registers, two codes in a register at a time.

``b & 0x7f`` moved to bits 10..4 of a bf16 is the code's value times 2**-120, for subnormal codes too, and ``b & 0x80``
its sign; one bf16 product with ``2**(scale - 127 + 120)`` gives the exact weight. Two codes share each instruction:
5 operations for 2 codes, where Triton's own conversion goes through fp16 and float32 one code at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engram_core.kernels.lookup import decode_e4m3fn, decode_e8m0

_TWO_BY_TWO = tl.constexpr("""
{
.reg .b32 x, y, s, t;
prmt.b32 x, $2, 0, 0x1404;
prmt.b32 y, $2, 0, 0x3424;
shr.u32 s, x, 4;
shr.u32 t, y, 4;
lop3.b32 s, s, x, 0x80008000, 0xe4;
lop3.b32 t, t, y, 0x80008000, 0xe4;
and.b32 s, s, 0x87f087f0;
and.b32 t, t, 0x87f087f0;
mul.rn.bf16x2 $0, s, $3;
mul.rn.bf16x2 $1, t, $4;
}
""")


@triton.jit
def decode_weight(code, scale, FAST: tl.constexpr):
    """bf16 weights of e4m3fn codes and scale bytes of broadcastable shapes.

    FAST: inline PTX, for weights without NaN codes and scale bytes up to 134; otherwise the definition, which also
    runs through the interpreter: one float32 product, one rounding.
    """
    if FAST:
        factor = ((scale.to(tl.int16) + 120) << 7).to(tl.bfloat16, bitcast=True)
        weight = tl.inline_asm_elementwise(
            _TWO_BY_TWO, "=r,=r,r,r,r", [code, factor], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        weight = (decode_e4m3fn(code) * decode_e8m0(scale)).to(tl.bfloat16)
    return weight
