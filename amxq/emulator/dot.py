"""Generates the dot products of tiles, one function each: C += A * B.

Arguments: pointers to the three tiles (16 rows of 64 bytes), rows of C, columns of C and
dwords in a row of A. Each row of C is one vector of 16 lanes.

TDPBF16PS and TDPFP16PS: the products of even and of odd k go through two chains of fused
multiply-adds that start at +0; even + odd; C + that. Rounding is to nearest even, denormal
results are flushed and denormal fp32 inputs are zero; the caller sets MXCSR so. (Denormal
fp16 inputs count: they are normal numbers in fp32.) The rule for NaN, as recorded from a
Xeon: a multiply-add returns A's NaN, else B's, else the accumulator's; a sum returns its
first operand's, in the orders written above; quieted, payload and sign kept; otherwise
invalid operations return FFC00000. LLVM is free to swap operands, so a row with a NaN in
its result is computed again with that rule written out.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from amxq.emulator.emit import F32, I16, I32, I64, PTR, VOID, Emitter, Value

LANES = 16
_VI = ir.VectorType(I32, LANES)
_VF = ir.VectorType(F32, LANES)
_VH = ir.VectorType(I16, LANES)
_ROW = 64


def _splat(f: Emitter, value: Value) -> Value:
    kind = ir.VectorType(value.type, LANES)
    one = f.insert_element(ir.Constant(kind, ir.Undefined), value, f.const(0, I32))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return f.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def _numbers(value: int) -> Value:
    return ir.Constant(_VI, [value] * LANES)


def _lanes_below(f: Emitter, columns: Value) -> Value:
    iota = ir.Constant(_VI, list(range(LANES)))
    return f.icmp_unsigned("<", iota, _splat(f, f.trunc(columns, I32)))


def _halves(f: Emitter, pairs: Value, fp16: bool) -> tuple[Value, Value]:
    """The even and odd elements of 16 pairs, as fp32."""
    if not fp16:
        even = f.shl(pairs, _numbers(16))
        odd = f.and_(pairs, _numbers(0xFFFF0000))
        return f.bitcast(even, _VF), f.bitcast(odd, _VF)
    half = ir.VectorType(ir.HalfType(), LANES)
    even = f.bitcast(f.trunc(pairs, _VH), half)
    odd = f.bitcast(f.trunc(f.lshr(pairs, _numbers(16)), _VH), half)
    return f.fpext(even, _VF), f.fpext(odd, _VF)


def _is_nan(f: Emitter, value: Value) -> Value:
    return f.fcmp_unordered("uno", value, value)


def _first_nan(f: Emitter, result: Value, operands: list[Value]) -> Value:
    """The first operand that is a NaN, quieted; ``result`` where none is."""
    for operand in reversed(operands):
        quiet = f.bitcast(f.or_(f.bitcast(operand, _VI), _numbers(1 << 22)), _VF)
        result = f.select(_is_nan(f, operand), quiet, result)
    return result


def _fma(f: Emitter, a: Value, b: Value, c: Value, careful: bool) -> Value:
    result = f.intrinsic("llvm.fma.v16f32", [_VF, _VF, _VF], _VF, a, b, c)
    return _first_nan(f, result, [a, b, c]) if careful else result


def _add(f: Emitter, a: Value, b: Value, careful: bool) -> Value:
    result = f.fadd(a, b)
    return _first_nan(f, result, [a, b]) if careful else result


def _float_row(
    f: Emitter, row: Value, c: Value, b: Value, pairs: Value, *, fp16: bool, careful: bool
) -> Value:
    zero = ir.Constant(_VF, [0.0] * LANES)
    even, odd = f.variable(zero, _VF), f.variable(zero, _VF)
    with f.count(0, pairs) as k:
        a = _splat(f, f.read(row, f.shl(k, f.const(2)), I32))
        a_even, a_odd = _halves(f, a, fp16)
        b_row = f.read(b, f.mul(k, f.const(_ROW)), _VI, align=64)
        b_even, b_odd = _halves(f, b_row, fp16)
        even.set(_fma(f, a_even, b_even, even.get(), careful))
        odd.set(_fma(f, a_odd, b_odd, odd.get(), careful))
    return _add(f, c, _add(f, even.get(), odd.get(), careful), careful)


def emit_float_dot(module: Any, name: str, *, fp16: bool) -> None:
    """``void name(c, a, b, rows, columns, pairs)``; MXCSR must be set by the caller."""
    f = Emitter(module, name, VOID, [PTR, PTR, PTR, I64, I64, I64])
    # not inlined: a call that touches memory stays between the caller's LDMXCSRs
    f.function.attributes.add("noinline")
    c, a, b, rows, columns, pairs = f.arguments
    live = _lanes_below(f, columns)
    with f.count(0, rows) as m:
        offset = f.mul(m, f.const(_ROW))
        c_row, a_row = f.at(c, offset), f.at(a, offset)
        before = f.read(c_row, 0, _VF, align=64)
        result = f.variable(_float_row(f, a_row, before, b, pairs, fp16=fp16, careful=False), _VF)
        odd_ones = f.and_(_is_nan(f, result.get()), live)
        with f.when(f.ne(f.bitcast(odd_ones, I16), 0)):
            result.set(_float_row(f, a_row, before, b, pairs, fp16=fp16, careful=True))
        zero = ir.Constant(_VF, [0.0] * LANES)
        f.write(f.select(live, result.get(), zero), c_row)
    f.ret_void()


def _byte(f: Emitter, value: Value, index: int, signed: bool) -> Value:
    """Byte ``index`` of each lane, extended to 32 bits."""
    if signed:
        return f.ashr(f.shl(value, _numbers(24 - 8 * index)), _numbers(24))
    return f.and_(f.lshr(value, _numbers(8 * index)), _numbers(255))


def emit_int_dot(module: Any, name: str, *, a_signed: bool, b_signed: bool) -> None:
    """``void name(c, a, b, rows, columns, quads)``: 8-bit products, int32 sums that wrap."""
    f = Emitter(module, name, VOID, [PTR, PTR, PTR, I64, I64, I64])
    c, a, b, rows, columns, quads = f.arguments
    live = _lanes_below(f, columns)
    with f.count(0, rows) as m:
        offset = f.mul(m, f.const(_ROW))
        c_row, a_row = f.at(c, offset), f.at(a, offset)
        sum_ = f.variable(f.read(c_row, 0, _VI, align=64), _VI)
        with f.count(0, quads) as k:
            left = _splat(f, f.read(a_row, f.shl(k, f.const(2)), I32))
            right = f.read(b, f.mul(k, f.const(_ROW)), _VI, align=64)
            for i in range(4):
                product = f.mul(_byte(f, left, i, a_signed), _byte(f, right, i, b_signed))
                sum_.set(f.add(sum_.get(), product))
        f.write(f.select(live, sum_.get(), _numbers(0)), c_row)
    f.ret_void()


def emit_dots(module: Any) -> None:
    """All six dot products, named as the instructions."""
    emit_float_dot(module, "TDPBF16PS", fp16=False)
    emit_float_dot(module, "TDPFP16PS", fp16=True)
    emit_int_dot(module, "TDPBSSD", a_signed=True, b_signed=True)
    emit_int_dot(module, "TDPBSUD", a_signed=True, b_signed=False)
    emit_int_dot(module, "TDPBUSD", a_signed=False, b_signed=True)
    emit_int_dot(module, "TDPBUUD", a_signed=False, b_signed=False)
