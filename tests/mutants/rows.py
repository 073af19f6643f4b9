"""Faults of number formats, tables and look-ups (contract, section 4)."""

from __future__ import annotations

from functools import partial

from mutants.model import Mutant

_scales = partial(Mutant, area="rows", function="engram_core.formats:decode_e8m0")
_codes = partial(Mutant, area="rows", function="engram_core.formats:decode_e4m3fn")
_decode = partial(Mutant, area="rows", function="engram_core.formats:rows_to_bf16")
_lookup = partial(Mutant, area="rows", function="engram_core.table:EngramTable.lookup")
_gather = partial(Mutant, area="rows", function="engram_core.table:EngramTable.gather")
_load = partial(Mutant, area="rows", function="engram_core.table:EngramTable.load")
_INDEX = "self.packed[local.masked_fill(~owned, 0)]"

MUTANTS = (
    _scales(
        name="scale-byte-0-zero",
        says="scale byte 0 is shifted into 0.0, not 2**-127",
        old="torch.where(byte == 0, 0x00400000, byte << 23)",
        new="byte << 23",
        cases=("rows-code-one", "rows-all-codes-all-scales"),
    ),
    _scales(
        name="scale-byte-255-infinite",
        says="scale byte 255 is infinity, not NaN",
        old="0x7FC00000",
        new="0x7F800000",
        cases=("rows-code-one", "rows-all-codes-all-scales"),
    ),
    _codes(
        name="codes-fnuz",
        says="codes are read as e4m3fnuz",
        old=".view(FP8)",
        new=".view(torch.float8_e4m3fnuz)",
        cases=("rows-all-codes-all-scales", "rows-code-negative-zero", "rows-code-one"),
    ),
    _codes(
        name="codes-no-nan",
        says="code 0x7f is 480",
        old=".to(torch.float32)",
        new=".to(torch.float32).nan_to_num(480.0)",
        cases=("rows-code-nan",),
    ),
    _codes(
        name="codes-no-negative-zero",
        says="code 0x80 is +0.0",
        old=".to(torch.float32)",
        new=".to(torch.float32) + 0.0",
        cases=("rows-code-negative-zero",),
    ),
    _decode(
        name="rows-subnormals-flushed",
        says="subnormal results are flushed",
        old="dequantize(*unpack_rows(packed))",
        new="(lambda x: torch.where(x.abs() < 2.0**-126, x * 0, x))(dequantize(*unpack_rows(packed)))",
        cases=("rows-code-one", "rows-all-codes-all-scales"),
    ),
    _decode(
        name="rows-truncated",
        says="the product is truncated to bf16, not rounded",
        old="dequantize(*unpack_rows(packed)).to(torch.bfloat16)",
        new="(dequantize(*unpack_rows(packed)).view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)",
        cases=("rows-all-codes-all-scales",),
    ),
    _decode(
        name="rows-fp16",
        says="rows go through fp16",
        old=".to(torch.bfloat16)",
        new=".half().to(torch.bfloat16)",
        cases=("rows-all-codes-all-scales", "rows-code-one"),
    ),
    _decode(
        name="rows-saturated",
        says="the product saturates, where it overflows to infinity",
        old=".to(torch.bfloat16)",
        new=".clamp(-3.38e38, 3.38e38).to(torch.bfloat16)",
        cases=("rows-all-codes-all-scales",),
    ),
    Mutant(
        name="rows-one-scale",
        area="rows",
        function="engram_core.formats:dequantize",
        says="a row's first scale serves all its blocks",
        old="decode_e8m0(scale)",
        new="decode_e8m0(scale[..., :1])",
        cases=("rows-scales-by-block",),
    ),
    _load(
        name="load-casts-scales",
        says="scales are loaded by value, not byte for byte",
        old=".copy_(scale_bytes(scales[there]))",
        new=".copy_(scales[there])",
        cases=("rows-load-bytes", "rows-tokens-2"),
    ),
    _load(
        name="load-from-the-top",
        says="a shard takes the first rows that it is given, not its own",
        old="slice(first - start, last - start)",
        new="slice(0, last - first)",
        cases=("rows-shard-24-over-2",),
    ),
    _load(
        name="load-ignores-start",
        says="every piece of a table is loaded to its beginning",
        old="self.shard.row_start) if self._shared is None",
        new="self.shard.row_start + start) if self._shared is None",
        cases=("rows-load-bytes",),
    ),
    _gather(
        name="ids-int32",
        says="int64 ids are cut to 32 bits",
        old=".to(torch.int64)",
        new=".to(torch.int32)",
        cases=("rows-too-large-int64",),
    ),
    _gather(
        name="offset-int32",
        says="byte offsets of rows are 32 bits wide",
        old=_INDEX,
        new="self.packed[(local.masked_fill(~owned, 0) * self.spec.width).to(torch.int32).long() // self.spec.width]",
        cases=("rows-beyond-2-33-bytes",),
    ),
    _gather(
        name="offset-uint32",
        says="byte offsets of rows wrap at 2**32",
        old=_INDEX,
        new="self.packed[(local.masked_fill(~owned, 0) * self.spec.width) % 2**32 // self.spec.width]",
        cases=("rows-beyond-2-33-bytes",),
    ),
    _gather(
        name="nowhere-clamped",
        says="ids out of range give the nearest row",
        old=f"{_INDEX}.masked_fill_(~owned.unsqueeze(-1), 0)",
        new="self.packed[local.clamp(0, self.shard.rows - 1)]",
        cases=("rows-negative", "rows-too-large"),
    ),
    _gather(
        name="nowhere-modulo",
        says="ids out of range are read modulo the table's size",
        old=f"{_INDEX}.masked_fill_(~owned.unsqueeze(-1), 0)",
        new="self.packed[local % self.shard.rows]",
        cases=("rows-negative", "rows-too-large"),
    ),
    _gather(
        name="negative-from-the-end",
        says="negative ids count from the table's end",
        old="(local >= 0) & (local < self.shard.rows)",
        new="local < self.shard.rows",
        cases=("rows-negative",),
    ),
    _gather(
        name="last-row-lost",
        says="the last row counts as out of range",
        old="(local < self.shard.rows)",
        new="(local < self.shard.rows - 1)",
        cases=("rows-tokens-1", "rows-beyond-2-33-bytes"),
    ),
    _gather(
        name="nowhere-unwritten",
        says="rows of ids out of range are left as `out` was",
        old="out[begin : begin + _CHUNK_TOKENS].copy_(rows if",
        new="out[begin : begin + _CHUNK_TOKENS][owned] = (lambda x: x[owned])(rows if",
        cases=("rows-out-poisoned", "rows-negative"),
    ),
    _gather(
        name="nowhere-scales-kept",
        says="of rows of ids out of range the codes alone are zeroed, and a NaN scale shows",
        old=f"rows = {_INDEX}.masked_fill_(~owned.unsqueeze(-1), 0)",
        new=f"rows = {_INDEX}; rows[..., : self.spec.head_dim].masked_fill_(~owned.unsqueeze(-1), 0)",
        cases=("rows-negative", "rows-too-large"),
    ),
    _gather(
        name="last-token-unwritten",
        says="the last token of a batch is not written",
        old="range(0, ids.shape[0], _CHUNK_TOKENS)",
        new="range(0, ids.shape[0] - 1, _CHUNK_TOKENS)",
        cases=("rows-tokens-513",),
    ),
    _gather(
        name="shard-start-forgotten",
        says="ids are not taken relative to the shard",
        old=" - self.shard.row_start",
        new="",
        cases=("rows-shard-24-over-2", "parallel-rows-24-over-2"),
    ),
    _lookup(
        name="ids-strides",
        says="ids are read as if dense",
        old="self.gather(ids[:, mine], out[:, :real], background)",
        new="self.gather(ids.as_strided(ids.shape, (ids.shape[1], 1))[:, mine], out[:, :real], background)",
        cases=("rows-ids-column-slice", "rows-ids-transposed"),
    ),
    _lookup(
        name="shard-first-columns",
        says="every rank looks up the first columns",
        old="slice(self.shard.first, self.shard.first + real)",
        new="slice(real)",
        cases=("rows-shard-24-over-2", "parallel-rows-24-over-2"),
    ),
    _lookup(
        name="shard-padding-unwritten",
        says="the padded columns of the last rank are left as they were",
        old="out[:, real:].zero_()",
        new="pass",
        cases=("rows-shard-15-over-4",),
    ),
    Mutant(
        name="file-first-rows",
        area="rows",
        function="engram_core.storage:allocate",
        says="every rank maps the file's first rows",
        old="[shard.row_start : shard.row_stop]",
        new="[: shard.rows]",
        cases=("parallel-file",),
    ),
    Mutant(
        name="file-size-unchecked",
        area="rows",
        function="engram_core.storage:map_file",
        says="a file that is too short is mapped",
        old="if size != need:",
        new="if size > need:",
        cases=("refuse-file-size",),
    ),
)
