"""Single instructions, executed by this CPU: the witness for amxq.codegen.instructions. Under
AMXQ_EMULATE on a CPU without AMX, tile instructions are the emulator's.

The code is LLVM IR with the intrinsics that carry tile numbers, compiled by the benchmark
harness's few lines around llvmlite; amxq's compiler has no part in it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from amxq import emulator
from amxq.codegen.instructions import TABLE
from amxq.errors import TargetError
from amxq.runtime import cpu, targets
from benchmarks.native import compile_ir

_P, _I = ctypes.c_void_p, ctypes.c_int64
_EMULATED = frozenset({"amx_tile", "amx_bf16", "amx_int8", "amx_fp16"})


def why_no_amx() -> str:
    """Why tile instructions cannot run in this process; empty if they can, from now on."""
    try:
        targets.require_runnable("amx")
    except TargetError as problem:
        return str(problem)
    return ""


def why_not(name: str) -> str:
    """Why the instruction ``name`` cannot run here; empty if it can."""
    if "amx_tile" in TABLE[name].requires and (reason := why_no_amx()):
        return reason
    has = cpu.flags() | (_EMULATED if emulator.is_installed() else frozenset())
    missing = sorted(TABLE[name].requires - has)
    return f"{name}: this CPU has no {', '.join(missing)}" if missing else ""


def tile_config(*tiles: tuple[int, int], palette: int = 1) -> np.ndarray[Any, Any]:
    """LDTILECFG's 64 bytes, from (rows, bytes a row) of tiles 0, 1, ..."""
    rows = [rows for rows, _ in tiles] + [0] * (16 - len(tiles))
    widths = [width for _, width in tiles] + [0] * (16 - len(tiles))
    return aligned(np.frombuffer(struct.pack("<B15x16H16B", palette, *widths, *rows), np.uint8))


def aligned(array: Any) -> np.ndarray[Any, Any]:
    """A C-ordered copy on a 64-byte boundary."""
    array = np.ascontiguousarray(array)
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@functools.cache
def _tile_dot_code(name: str) -> Callable[..., int]:
    text = f"""
    declare void @llvm.x86.ldtilecfg(ptr)
    declare void @llvm.x86.tilerelease()
    declare void @llvm.x86.tileloadd64(i8, ptr, i64)
    declare void @llvm.x86.tilestored64(i8, ptr, i64)
    declare void @{TABLE[name].llvm}(i8, i8, i8)
    define i64 @dot(ptr %config, ptr %c, ptr %a, ptr %b, i64 %wide, i64 %deep,
                    i64 %c_size, i64 %a_size, i64 %b_size, i64 %count) {{
    entry:
      call void @llvm.x86.ldtilecfg(ptr %config)
      br label %loop
    loop:
      %i = phi i64 [ 0, %entry ], [ %next, %loop ]
      %c_offset = mul i64 %i, %c_size
      %a_offset = mul i64 %i, %a_size
      %b_offset = mul i64 %i, %b_size
      %ci = getelementptr i8, ptr %c, i64 %c_offset
      %ai = getelementptr i8, ptr %a, i64 %a_offset
      %bi = getelementptr i8, ptr %b, i64 %b_offset
      call void @llvm.x86.tileloadd64(i8 0, ptr %ci, i64 %wide)
      call void @llvm.x86.tileloadd64(i8 1, ptr %ai, i64 %deep)
      call void @llvm.x86.tileloadd64(i8 2, ptr %bi, i64 %wide)
      call void @{TABLE[name].llvm}(i8 0, i8 1, i8 2)
      call void @llvm.x86.tilestored64(i8 0, ptr %ci, i64 %wide)
      %next = add i64 %i, 1
      %more = icmp ult i64 %next, %count
      br i1 %more, label %loop, label %done
    done:
      call void @llvm.x86.tilerelease()
      ret i64 0
    }}"""
    functions = {"dot": (_P,) * 4 + (_I,) * 6}
    llvm_cpu = "graniterapids" if name == "tdpfp16ps" else "sapphirerapids"
    return compile_ir(text, functions, llvm_cpu=llvm_cpu)["dot"]


def tile_dot(name: str, c: Any, a: Any, b: Any) -> np.ndarray[Any, Any]:
    """Execute a tile dot product on n independent problems.

    Args:
        c: [n, M, N] fp32 or int32; a [n, M, ...], b [n, K, ...] as the meanings take them.

    Returns:
        the new c.
    """
    c, a, b = aligned(c), aligned(a), aligned(b)
    rows, wide = c.shape[1], c[0, 0].nbytes
    deep = a[0, 0].nbytes
    config = tile_config((rows, wide), (rows, deep), (b.shape[1], wide))
    pointers = [x.ctypes.data for x in (config, c, a, b)]
    sizes = [x[0].nbytes for x in (c, a, b)]
    _tile_dot_code(name)(*pointers, wide, deep, *sizes, len(c))
    return c


_VECTORS = {  # name -> LLVM types of the result and of the operands
    "vdpbf16ps": ("<16 x float>", "<16 x float>", "<32 x bfloat>", "<32 x bfloat>"),
    "vpdpbusd": ("<16 x i32>", "<16 x i32>", "<64 x i8>", "<64 x i8>"),
    "vpmaddubsw": ("<32 x i16>", "<64 x i8>", "<64 x i8>"),
    "vpmaddwd": ("<16 x i32>", "<32 x i16>", "<32 x i16>"),
    "vpermw": ("<32 x i16>", "<32 x i16>", "<32 x i16>"),
}


@functools.cache
def _vector_code(name: str) -> Callable[..., int]:
    result, *kinds = _VECTORS[name]
    letters = "xyz"[: len(kinds)]
    arguments = ", ".join(f"{kind} %{letter}" for kind, letter in zip(kinds, letters, strict=True))
    loads = "\n".join(
        f"%{x}p = getelementptr i8, ptr %{x}a, i64 %o\n%{x} = load {kind}, ptr %{x}p, align 64"
        for kind, x in zip(kinds, letters, strict=True)
    )
    text = f"""
    declare {result} @{TABLE[name].llvm}({", ".join(kinds)})
    define i64 @vector({", ".join(f"ptr %{x}a" for x in letters)}, ptr %out, i64 %count) {{
    entry:
      br label %loop
    loop:
      %i = phi i64 [ 0, %entry ], [ %next, %loop ]
      %o = mul i64 %i, 64
      {loads}
      %r = call {result} @{TABLE[name].llvm}({arguments})
      %rp = getelementptr i8, ptr %out, i64 %o
      store {result} %r, ptr %rp, align 64
      %next = add i64 %i, 1
      %more = icmp ult i64 %next, %count
      br i1 %more, label %loop, label %done
    done:
      ret i64 0
    }}"""
    return compile_ir(text, {"vector": (_P,) * (len(kinds) + 1) + (_I,)})["vector"]


def vector(name: str, *operands: Any) -> np.ndarray[Any, Any]:
    """Execute a vector instruction on n × 64-byte operands, in the order of the meaning."""
    copies = [aligned(x) for x in operands]
    lanes, _, element = _VECTORS[name][0].strip("<>").split()
    kind = {"float": np.float32, "i32": np.int32, "i16": np.uint16}[element]
    out = aligned(np.zeros((len(copies[0]), int(lanes)), kind))
    _vector_code(name)(*(x.ctypes.data for x in copies), out.ctypes.data, len(out))
    return out


@functools.cache
def _tile_copy_code() -> Callable[..., int]:
    text = """
    declare void @llvm.x86.ldtilecfg(ptr)
    declare void @llvm.x86.tilerelease()
    declare void @llvm.x86.tileloadd64(i8, ptr, i64)
    declare void @llvm.x86.tilestored64(i8, ptr, i64)
    define i64 @copy(ptr %config, ptr %from, i64 %from_stride, ptr %to, i64 %to_stride) {
      call void @llvm.x86.ldtilecfg(ptr %config)
      call void @llvm.x86.tileloadd64(i8 0, ptr %from, i64 %from_stride)
      call void @llvm.x86.tilestored64(i8 0, ptr %to, i64 %to_stride)
      call void @llvm.x86.tilerelease()
      ret i64 0
    }"""
    return compile_ir(text, {"copy": (_P, _P, _I, _P, _I)})["copy"]


def tile_copy(source: Any, stride: int, target: Any, target_stride: int, rows: int, width: int):
    """TILELOADD from one flat uint8 array, TILESTORED to a copy of another, which is returned."""
    source, target, config = aligned(source), aligned(target), tile_config((rows, width))
    pointers = source.ctypes.data, stride, target.ctypes.data, target_stride
    _tile_copy_code()(config.ctypes.data, *pointers)
    return target


def assembly(intrinsic: str, call: str) -> str:
    """What LLVM makes of one call, for a CPU that has every instruction of the table.

    Args:
        call: ``"<result type>(<type> <value>, ...)"``; values %0, %1, ... are arguments.
    """
    import llvmlite.binding as llvm

    result, _, arguments = call.rstrip(")").partition("(")
    pairs = [x.rsplit(" ", 1) for x in arguments.split(", ") if x]
    parameters = ", ".join(kind for kind, value in pairs if value.startswith("%"))
    name = "" if result == "void" else "%r = "
    text = f"""
    declare {result} @{intrinsic}({", ".join(kind for kind, _ in pairs)})
    define {result} @f({parameters}) {{
    entry:
      {name}call {result} @{intrinsic}({arguments})
      ret {result}{" %r" if name else ""}
    }}"""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="graniterapids", opt=2)
    return str(machine.emit_assembly(llvm.parse_assembly(text)))


@functools.cache
def _fault_code(body: str) -> Callable[..., int]:
    text = f"""
    declare void @llvm.x86.ldtilecfg(ptr)
    declare void @llvm.x86.sttilecfg(ptr)
    declare void @llvm.x86.tilerelease()
    declare void @llvm.x86.tilezero(i8)
    declare void @llvm.x86.tileloadd64(i8, ptr, i64)
    declare void @llvm.x86.tilestored64(i8, ptr, i64)
    declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
    define i64 @f(ptr %config, ptr %memory) {{
      {body}
      ret i64 0
    }}"""
    return compile_ir(text, {"f": (_P, _P)})["f"]


def signal_of(body: str, config: Any, memory: int | None = None) -> int:
    """The number of the signal that ends a forked child which runs ``body``, 0 for none.

    Args:
        body: calls of the intrinsics above; %config and %memory (4 KB) are pointers.
        config: the 64 bytes at %config.
        memory: an address for %memory, for bad ones.
    """
    code, config = _fault_code(body), aligned(config)
    room = aligned(np.zeros(4096, np.uint8))
    address = room.ctypes.data if memory is None else memory
    child = os.fork()
    if child == 0:
        emulated = emulator.is_installed()
        emulator.uninstall()
        for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS):
            signal.signal(number, signal.SIG_DFL)  # not faulthandler's
        if emulated:
            emulator.install()
        code(config.ctypes.data, address)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
