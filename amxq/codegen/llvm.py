"""Lowered tile-IR to LLVM IR, as text.

One kernel becomes a module whose one function to call is

    @NAME_launch(ptr data, i64 threads)

``data`` is an array of 8-byte slots: the three grid sizes, the addresses of omp_get_thread_num and
GOMP_parallel (not looked at for one thread), then the arguments (integers as i64, floats as
doubles). It calls @range(ptr team, i64 thread) on so many threads, see :mod:`amxq.codegen.team`,
which runs programs as long as there are some. On AMX @range loads the tile configuration first
and releases the tiles at the end.
"""

from __future__ import annotations

from amxq.codegen.debug import LineTable
from amxq.codegen.team import SLOTS, TEAM
from amxq.codegen.text import llvm_type
from amxq.codegen.values import Emitter
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import F64, I1, I64, DType, PointerType


def emit_llvm(function: Function, debug: LineTable | None = None) -> str:
    """The module's text for a function without tiles (after vectorisation), and if ``debug`` is
    given with the source lines of instructions."""
    return _Codegen(function, debug).module()


class _Codegen:
    def __init__(self, function: Function, debug: LineTable | None) -> None:
        self.function, self.debug = function, debug
        self.e = Emitter()
        self.allocas: list[str] = []
        self.grid: dict[str, str] = {}

    def module(self) -> str:
        entry = Emitter(self.e)
        self._prologue(entry)
        self.block(self.function.body)
        body = "\n".join(self.e.lines)
        begin, end = self._tile_configuration()
        scope = " !dbg !2" if self.debug is not None else ""
        lines = [
            f"define internal void @range(ptr %team, i64 %thread) noinline{scope} {{",
            "entry:",
            *entry.lines,
            *self.allocas,
            *begin,
            "  br label %claim",
            "claim:",
            "  %claimed = call i64 @take(ptr %team, i64 %thread)",
            "  %none = icmp eq i64 %claimed, 0",
            "  br i1 %none, label %done, label %first",
            "first:",
            "  %lo.unit = and i64 %claimed, 4294967295",
            "  %hi.unit = lshr i64 %claimed, 32",
            f"  %lo = mul i64 %lo.unit, {self.grid['unit']}",
            f"  %hi.all = mul i64 %hi.unit, {self.grid['unit']}",
            f"  %beyond = icmp ugt i64 %hi.all, {self.grid['total']}",
            f"  %hi = select i1 %beyond, i64 {self.grid['total']}, i64 %hi.all",
            "  br label %program",
            "program:",
            "  %lin = phi i64 [ %lo, %first ], [ %lin.next, %next ]",
            *self._program_ids(),
            body,
            "  br label %next",
            "next:",
            "  %lin.next = add i64 %lin, 1",
            "  %more = icmp ult i64 %lin.next, %hi",
            "  br i1 %more, label %program, label %claim",
            "done:",
            *end,
            "  ret void",
            "}",
        ]
        text = TEAM.format(name=self.function.name) + "\n" + "\n".join(lines) + "\n"
        text += "\n" + "\n".join(sorted(self.e.declarations)) + "\n"
        return text if self.debug is None else text + self.debug.text(self.function.name)

    # --- the frame around a program -------------------------------------------------------

    def _prologue(self, e: Emitter) -> None:
        for name, number in (("unit", 2), ("total", 4)):
            slot = e.line(f"getelementptr i64, ptr %team, i64 {number}")
            self.grid[name] = e.line(f"load i64, ptr {slot}")
        data = e.line("load ptr, ptr %team")
        for axis in range(3):
            slot = e.line(f"getelementptr i64, ptr {data}, i64 {axis}")
            self.grid[f"n{axis}"] = e.line(f"load i64, ptr {slot}")
        for i, param in enumerate(self.function.params):
            slot = e.line(f"getelementptr i64, ptr {data}, i64 {SLOTS + i}")
            type_ = param.type
            if isinstance(type_, PointerType):
                name = e.line(f"load ptr, ptr {slot}")
            else:
                assert isinstance(type_, DType)
                wide = F64 if type_.is_float else I64
                name = e.line(f"load {llvm_type(wide)}, ptr {slot}")
                if type_ == I1:  # a number other than 0 and 1 cannot arrive
                    name = e.line(f"trunc i64 {name} to i1")
                elif type_.bits < 64:
                    name = e.convert(name, wide, type_)
            self.e.names[param] = name

    def _program_ids(self) -> list[str]:
        """The linear number taken apart; axis 0 runs fastest."""
        n0, n1 = self.grid["n0"], self.grid["n1"]
        lines = [
            f"  %id0 = urem i64 %lin, {n0}",
            f"  %rest = udiv i64 %lin, {n0}",
            f"  %id1 = urem i64 %rest, {n1}",
            f"  %id2 = udiv i64 %rest, {n1}",
        ]
        return lines + [f"  %pid{a} = trunc i64 %id{a} to i32" for a in range(3)]

    def _tile_configuration(self) -> tuple[list[str], list[str]]:
        """LDTILECFG once per thread and launch; TILERELEASE so that context switches and
        signals need not save 8 KB of tiles afterwards."""
        tiles = self.function.tiles
        if not tiles:
            return [], []
        words = [0] * 32  # palette, start row; colsb at bytes 16 to 31, rows at 48 to 55
        raw = bytearray(64)
        raw[0] = 1
        for i, (rows, row_bytes) in enumerate(tiles):
            raw[16 + 2 * i] = row_bytes
            raw[48 + i] = rows
        words = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(8)]
        begin = ["  %tilecfg = alloca [8 x i64], align 64"]
        for i, word in enumerate(words):
            begin.append(f"  %cfg{i} = getelementptr i64, ptr %tilecfg, i64 {i}")
            begin.append(f"  store i64 {word}, ptr %cfg{i}")
        begin.append("  call void @llvm.x86.ldtilecfg(ptr %tilecfg)")
        self.e.declarations.add("declare void @llvm.x86.ldtilecfg(ptr)")
        self.e.declarations.add("declare void @llvm.x86.tilerelease()")
        return begin, ["  call void @llvm.x86.tilerelease()"]

    # --- operations -----------------------------------------------------------------------

    def block(self, block: Block) -> tuple[Value, ...]:
        for op in block.ops:
            if isinstance(op, ops.Yield):
                return op.values
            start = len(self.e.lines)
            self.op(op)
            if self.debug is not None:
                self.debug.mark(self.e.lines, start, op.loc)
        return ()

    def op(self, op: Op) -> None:
        e = self.e
        if isinstance(op, ops.For):
            self._for(op)
        elif isinstance(op, ops.While):
            self._while(op)
        elif isinstance(op, ops.If):
            self._if(op)
        elif isinstance(op, ops.ProgramId):
            e.names[op.result] = f"%pid{op.axis}"
        elif isinstance(op, ops.NumPrograms):
            e.define(op, f"trunc i64 {self.grid[f'n{op.axis}']} to i32")
        elif isinstance(op, hw.Scratch):
            name = f"%scratch{len(self.allocas)}"
            self.allocas.append(f"  {name} = alloca [{op.bytes} x i8], align 64")
            e.names[op.result] = name
        elif isinstance(op, hw.TILE_OPS):
            self._tile(op)
        else:
            e.operation(op)

    def _tile(self, op: Op) -> None:
        e = self.e
        if isinstance(op, hw.TileZero):
            e.declarations.add("declare void @llvm.x86.tilezero(i8)")
            e.lines.append(f"  call void @llvm.x86.tilezero(i8 {op.t})")
        elif isinstance(op, hw.TILE_DOTS):
            e.declarations.add(f"declare void @llvm.x86.{op.name}(i8, i8, i8)")
            e.lines.append(f"  call void @llvm.x86.{op.name}(i8 {op.c}, i8 {op.a}, i8 {op.b})")
        elif isinstance(op, (hw.TileLoad, hw.TileStore)):
            name = "tilestored64"
            if isinstance(op, hw.TileLoad):
                name = "tileloaddt164" if op.once else "tileloadd64"
            e.declarations.add(f"declare void @llvm.x86.{name}(i8, ptr, i64)")
            place = f"ptr {e.names[op.pointer]}, i64 {e.names[op.stride]}"
            e.lines.append(f"  call void @llvm.x86.{name}(i8 {op.t}, {place})")

    def _for(self, op: ops.For) -> None:
        e = self.e
        n = e.number()
        index, *carried = op.body.args
        itype = llvm_type(index.type)
        lower, upper, step = (e.names[v] for v in (op.lower, op.upper, op.step))
        before = e.label
        e.branch(f"head{n}")
        e.names[index] = f"%i{n}"
        phi_line = len(e.lines)
        for j, arg in enumerate(carried):
            e.names[arg] = f"%c{n}.{j}"
        e.lines.append(f"  %go{n} = icmp slt {itype} %i{n}, {upper}")
        e.lines.append(f"  br i1 %go{n}, label %body{n}, label %exit{n}")
        e.start(f"body{n}")
        values = self.block(op.body)
        e.lines.append(f"  %i{n}.next = add nsw {itype} %i{n}, {step}")
        last = e.label
        e.lines.append(f"  br label %head{n}")
        phis = [f"  %i{n} = phi {itype} [ {lower}, %{before} ], [ %i{n}.next, %{last} ]"]
        e.lines[phi_line:phi_line] = phis + self._carried(n, op, values, before, last)
        e.start(f"exit{n}")

    def _while(self, op: ops.While) -> None:
        e = self.e
        n = e.number()
        before = e.label
        e.branch(f"head{n}")
        phi_line = len(e.lines)
        for j, (tested, arg) in enumerate(zip(op.test.args, op.body.args)):
            e.names[tested] = e.names[arg] = f"%c{n}.{j}"
        (condition,) = self.block(op.test)
        e.lines.append(f"  br i1 {e.names[condition]}, label %body{n}, label %exit{n}")
        e.start(f"body{n}")
        values = self.block(op.body)
        last = e.label
        e.lines.append(f"  br label %head{n}")
        e.lines[phi_line:phi_line] = self._carried(n, op, values, before, last)
        e.start(f"exit{n}")

    def _carried(
        self, n: int, op: ops.For | ops.While, values: tuple[Value, ...], before: str, last: str
    ) -> list[str]:
        """The phis of what loop ``n`` carries; names its results after them."""
        e = self.e
        phis = []
        for j, (init, value, result) in enumerate(zip(op.inits, values, op.results)):
            e.names[result] = f"%c{n}.{j}"
            pair = f"[ {e.names[init]}, %{before} ], [ {e.names[value]}, %{last} ]"
            phis.append(f"  %c{n}.{j} = phi {llvm_type(init.type)} {pair}")
        return phis

    def _if(self, op: ops.If) -> None:
        e = self.e
        n = e.number()
        e.lines.append(f"  br i1 {e.names[op.condition]}, label %then{n}, label %else{n}")
        ends = []
        for label, block in ((f"then{n}", op.then), (f"else{n}", op.other)):
            e.start(label)
            values = [e.names[v] for v in self.block(block)]
            ends.append((e.label, values))
            e.lines.append(f"  br label %join{n}")
        e.start(f"join{n}")
        for j, result in enumerate(op.results):
            pairs = ", ".join(f"[ {values[j]}, %{label} ]" for label, values in ends)
            e.define_value(result, f"phi {llvm_type(result.type)} {pairs}")
