"""Puts the generated functions together and compiles them for this CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amxq.emulator import layout as L
from amxq.errors import TargetError

_TABLE_FULL = b"amxq emulator: more threads use tiles at once than its table has room for\n"
_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")


@dataclass(frozen=True)
class Machine:
    """Compiled code; the addresses live as long as ``engine``."""

    engine: Any
    handler: int
    emulate: int
    control: int


def module_text(*, address_bits: int, direct: bool) -> str:
    """The emulator as LLVM IR text.

    Args:
        address_bits: width of a canonical address, 48 or 57.
        direct: touch the program's memory directly instead of by process_vm_readv.
    """
    from llvmlite import ir

    from amxq.emulator import decode, dot, execute, handler, memory, state
    from amxq.emulator.emit import I8, I64, PTR

    module = ir.Module(name="amxq_emulator")
    ir.Function(module, ir.FunctionType(I64, [I64] * 7), "syscall")
    ir.Function(module, ir.FunctionType(PTR, []), "__errno_location")

    def constant(name: str, data: bytes) -> None:
        kind = ir.ArrayType(I8, len(data))
        variable = ir.GlobalVariable(module, kind, name)
        variable.global_constant, variable.linkage = True, "internal"
        variable.initializer = ir.Constant(kind, bytearray(data))

    constant("greg_of_register", bytes(L.GREG_OF_REGISTER))
    constant("table_full", _TABLE_FULL)
    kind = ir.ArrayType(I8, state.CONTROL_BYTES)
    control = ir.GlobalVariable(module, kind, "control")
    control.initializer, control.align = ir.Constant(kind, None), 64

    decode.emit_decode(module)
    memory.emit_move_rows(module, address_bits=address_bits, direct=direct)
    memory.emit_store_rows(module)
    dot.emit_dots(module)
    execute.emit_execute(module)
    state.emit_adopt(module)
    state.emit_find_thread(module)
    handler.emit_run(module)
    handler.emit_emulate(module)
    handler.emit_pull_frame(module)
    handler.emit_push_frame(module)
    handler.emit_chain(module)
    handler.emit_deliver(module)
    handler.emit_handler(module, len(_TABLE_FULL))
    return str(module)


def compile_machine(flags: frozenset[str], *, direct: bool) -> Machine:
    """Compile for a CPU with these /proc/cpuinfo flags.

    Raises:
        TargetError: the CPU has no AVX2.
    """
    import llvmlite.binding as llvm

    missing = [flag for flag in _AVX2 if flag not in flags]
    if missing:
        raise TargetError(
            f"the AMX emulator needs a CPU with {', '.join(_AVX2)}; this one lacks "
            f"{', '.join(missing)}. Run without AMXQ_EMULATE"
        )
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = module_text(address_bits=57 if "la57" in flags else 48, direct=direct)
    module = llvm.parse_assembly(text)
    module.verify()
    wide = all(flag in flags for flag in _AVX512)
    level = "x86-64-v4" if wide else "x86-64-v3"
    target = llvm.Target.from_default_triple()
    # without prefer-256-bit v4 splits 512-bit vectors
    features = "-prefer-256-bit" if wide else ""
    machine = target.create_target_machine(cpu=level, features=features, opt=2)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return Machine(
        engine=engine,
        handler=engine.get_function_address("handler"),
        emulate=engine.get_function_address("emulate"),
        control=engine.get_global_value_address("control"),
    )
