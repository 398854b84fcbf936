"""Generates ``handler``, the SIGILL handler, and ``emulate``, the same without signals.

The handler runs in a signal context, in any thread: it calls nothing but system calls (by
libc's syscall()), allocates nothing and takes no lock. All signals are blocked while it
runs, so a second SIGILL cannot interrupt it.

- Tile instructions are executed one after another; RIP moves on; the program continues at
  the first other instruction. Nothing beyond the page of the next instruction is read.
- #UD, like every SIGILL that is not ours, goes to the handler that was there before.
- #GP, #SS and page faults: SIGSEGV or SIGBUS is queued to the thread with the siginfo that
  Linux would give; it arrives when the handler returns, with RIP at the instruction.
- On a CPU that has AMX, in a process without permission for tile data, LDTILECFG and
  TILERELEASE do not trap (they touch no tile data). Their effect is read from TILECFG in
  the signal frame; the emulator leaves a mark there to tell a new configuration from the
  one it knows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from amxq.emulator import layout as L
from amxq.emulator import state as S
from amxq.emulator.emit import I1, I8, I32, I64, PTR, VOID, Emitter, Value
from amxq.emulator.state import control, system_call

_PAGE = 4096
_SIG_SETMASK = 2
_MAGIC1 = 0x46505853  # FP_XSTATE_MAGIC1: the frame has an XSAVE area
_SA_RESETHAND = 0x80000000


def emit_run(module: Any) -> None:
    """``i64 run(context, index, pid, fault)``: as many tile instructions as follow RIP.

    STEP_DONE when at least one was executed (a fault of a later one is left to its own
    trap), else STEP_FAULT or STEP_FOREIGN.
    """
    f = Emitter(module, "run", I64, [PTR, I64, I64, PTR])
    context, index, pid, fault = f.arguments
    header = f.at(control(f, S.C_HEADERS, PTR), f.mul(index, f.const(L.HEADER_BYTES)))
    tiles = f.at(control(f, S.C_TILES, PTR), f.mul(index, f.const(L.DATA_BYTES)))
    instruction = f.space(L.INSTRUCTION_BYTES)
    done, last = f.variable(0, I1), f.variable(L.STEP_FOREIGN)
    with f.loop() as leave:
        last.set(L.STEP_FOREIGN)
        kind = f.call_named("decode", context, instruction)
        leave(f.eq(kind, 0))
        f.write(0, fault, L.F_KIND)
        last.set(f.call_named("execute", instruction, header, tiles, pid, fault))
        leave(f.ne(last.get(), L.STEP_DONE))
        done.set(1)
        count = f.at(header, f.add(f.shl(kind, f.const(3)), f.const(L.H_COUNTS - 8)))
        f.write(f.add(f.read(count), f.const(1)), count)
        rip = f.add(f.read(context, L.REG_RIP), f.read(instruction, L.I_LENGTH))
        f.write(rip, context, L.REG_RIP)
        leave(f.lt(f.const(_PAGE - 16), f.and_(rip, f.const(_PAGE - 1))))
    f.ret(f.select(done.get(), f.const(L.STEP_DONE), last.get()))


def emit_emulate(module: Any) -> None:
    """``i64 emulate(context, fault)``: what a trap at the context's RIP would do."""
    f = Emitter(module, "emulate", I64, [PTR, PTR], public=True)
    context, fault = f.arguments
    index = f.call_named("find_thread", system_call(f, L.SYS_GETTID))
    f.return_if(f.icmp_signed("<", index, f.const(0)), f.const(L.STEP_FOREIGN))
    f.ret(f.call_named("run", context, index, system_call(f, L.SYS_GETPID), fault))


def _frame(f: Emitter, context: Value) -> tuple[Value, Value]:
    """The frame's FXSAVE image, and whether an XSAVE area with TILECFG is behind it."""
    image = f.read(context, L.FPREGS, PTR)
    has = f.variable(0, I1)
    with f.when(f.ne(f.ptrtoint(image, I64), 0)):
        magic = f.eq(f.read(image, 464, I32), _MAGIC1)
        feature = f.and_(f.read(image, L.FX_FEATURES), f.const(L.TILECFG_FEATURE))
        has.set(f.and_(magic, f.ne(feature, 0)))
    return image, has.get()


def emit_pull_frame(module: Any) -> None:
    """``pull_frame(context, header, tiles)``: learn what LDTILECFG and TILERELEASE did."""
    f = Emitter(module, "pull_frame", VOID, [PTR, PTR, PTR])
    context, header, tiles = f.arguments
    image, has = _frame(f, context)
    config = f.at(header, L.H_CONFIG)

    def count(name: str) -> None:
        offset = L.H_COUNTS + 8 * (L.NUMBER[name] - 1)
        f.write(f.add(f.read(header, offset), f.const(1)), header, offset)

    with f.when(has):
        live = f.and_(f.read(image, L.FX_XSTATE_BV), f.const(L.TILECFG_FEATURE))
        with f.if_else(f.ne(live, 0)) as (configured, released):
            with configured:
                seen = f.at(image, L.FX_TILECFG)
                differs = f.ne(f.read(seen, 1, I8), f.const(L.MARK, I8))
                for offset in (0, *range(16, 64, 8)):
                    # all but the mark; bytes 2 to 15 are zero in both
                    part = f.xor(f.read(seen, offset), f.read(config, offset))
                    ignore = ~0xFF00 if offset == 0 else -1
                    differs = f.or_(differs, f.ne(f.and_(part, f.const(ignore)), 0))
                with f.when(differs):
                    for offset in range(0, 64, 8):
                        f.write(f.read(seen, offset), config, offset)
                    # inherited from a thread with a mark
                    with f.when(f.eq(f.read(seen, 1, I8), L.MARK)):
                        f.write(f.const(0, I8), config, 1)
                    f.fill(tiles, L.DATA_BYTES)
                    count("LDTILECFG")
            with released:
                with f.when(f.ne(f.read(config, 0, I8), 0)):
                    f.fill(config, 64)
                    f.fill(tiles, L.DATA_BYTES)
                    count("TILERELEASE")
    f.ret_void()


def emit_push_frame(module: Any) -> None:
    """``push_frame(context, header)``: give the CPU the configuration, marked."""
    f = Emitter(module, "push_frame", VOID, [PTR, PTR])
    context, header = f.arguments
    image, has = _frame(f, context)
    config = f.at(header, L.H_CONFIG)
    with f.when(has):
        present = f.read(image, L.FX_XSTATE_BV)
        without = f.and_(present, f.const(~L.TILECFG_FEATURE))
        with_it = f.or_(present, f.const(L.TILECFG_FEATURE))
        configured = f.ne(f.read(config, 0, I8), 0)
        f.write(f.select(configured, with_it, without), image, L.FX_XSTATE_BV)
        for offset in range(0, 64, 8):
            f.write(f.read(config, offset), f.at(image, L.FX_TILECFG), offset)
        f.write(f.const(L.MARK, I8), f.at(image, L.FX_TILECFG), 1)
    f.ret_void()


def emit_chain(module: Any) -> None:
    """``chain(signal, info, context, sent)``: hand a SIGILL to the previous handler.

    ``sent``: it came from kill or raise. Such a signal goes to the handler found at the
    very first installation: a handler put in later (Python's faulthandler) hands signals
    on by restoring ours and raising again, and would get its own back for ever.
    """
    f = Emitter(module, "chain", VOID, [I32, PTR, PTR, I1])
    number, info, context, sent = f.arguments
    previous, flags, mask = (
        f.select(sent, control(f, first), control(f, latest))
        for first, latest in (
            (S.C_FIRST, S.C_PREVIOUS),
            (S.C_FIRST_FLAGS, S.C_PREVIOUS_FLAGS),
            (S.C_FIRST_MASK, S.C_PREVIOUS_MASK),
        )
    )
    with f.when(f.and_(sent, f.eq(previous, L.SIG_IGN))):
        f.ret_void()
    with f.when(f.is_one_of(previous, (L.SIG_DFL, L.SIG_IGN))):
        # like the kernel, which does not let a fault be ignored: the default action. A fault
        # comes again when its instruction does, a sent signal has to be sent again.
        _set_default(f, L.SIGILL)
        with f.when(sent):
            pid, tid = system_call(f, L.SYS_GETPID), system_call(f, L.SYS_GETTID)
            system_call(f, L.SYS_TGKILL, pid, tid, L.SIGILL)
        f.ret_void()
    with f.when(f.ne(f.and_(flags, f.const(_SA_RESETHAND)), 0)):
        for field in (S.C_PREVIOUS, S.C_FIRST):
            with f.when(f.eq(control(f, field), previous)):
                f.write(L.SIG_DFL, f.module.get_global("control"), field)
    again = f.ne(f.and_(flags, f.const(L.SA_NODEFER)), 0)
    own = f.select(again, f.const(0), f.const(1 << (L.SIGILL - 1)))
    place = f.space(8)
    f.write(f.or_(f.or_(f.read(context, L.SIGMASK), mask), own), place)
    system_call(f, L.SYS_RT_SIGPROCMASK, _SIG_SETMASK, place, 0, 8)
    # the kernel passes all three on x86-64 even without SA_SIGINFO
    kind = ir.FunctionType(VOID, [I32, PTR, PTR])
    f.call(_Callee(f.inttoptr(previous, PTR), kind), [number, info, context])
    f.ret_void()


class _Callee:
    """A function pointer with the type that llvmlite's call instruction asks it for."""

    def __init__(self, pointer: Value, function_type: Any) -> None:
        self.pointer, self.function_type = pointer, function_type
        self.type = pointer.type

    def get_reference(self) -> str:
        return str(self.pointer.get_reference())


def _set_default(f: Emitter, signal: Value | int) -> None:
    action = f.space(32)  # the kernel's struct sigaction: handler, flags, restorer, mask
    f.fill(action, 32)
    system_call(f, L.SYS_RT_SIGACTION, signal, action, 0, 8)


def emit_deliver(module: Any) -> None:
    """``deliver(context, fault, pid, tid)``: queue SIGSEGV or SIGBUS as Linux would."""
    f = Emitter(module, "deliver", VOID, [PTR, PTR, I64, I64])
    context, fault, pid, tid = f.arguments
    kind, address = f.read(fault, L.F_KIND), f.read(fault, L.F_ADDRESS)
    signal = f.select(f.eq(kind, L.FAULT_SS), f.const(L.SIGBUS), f.const(L.SIGSEGV))
    code = f.variable(L.SI_KERNEL)
    with f.when(f.eq(kind, L.FAULT_PAGE)):
        page, unused = f.and_(address, f.const(-_PAGE)), f.space(8)
        mapped = system_call(f, L.SYS_MINCORE, page, 1, unused)
        code.set(f.select(f.eq(mapped, 0), f.const(L.SEGV_ACCERR), f.const(L.SEGV_MAPERR)))
    info = f.space(128)
    f.fill(info, 128)
    f.write(signal, info)
    f.write(f.trunc(code.get(), I32), info, L.SI_CODE)
    f.write(address, info, L.SI_ADDR)
    # a fault that is blocked or ignored kills: what force_sig does in the kernel
    action = f.space(32)
    system_call(f, L.SYS_RT_SIGACTION, signal, 0, action, 8)
    bit = f.shl(f.const(1), f.sub(signal, f.const(1)))
    mask = f.read(context, L.SIGMASK)
    blocked = f.ne(f.and_(mask, bit), 0)
    with f.when(f.or_(blocked, f.eq(f.read(action), L.SIG_IGN))):
        _set_default(f, signal)
        f.write(f.and_(mask, f.not_(bit)), context, L.SIGMASK)
    system_call(f, L.SYS_RT_TGSIGQUEUEINFO, pid, tid, signal, info)
    f.ret_void()


def emit_handler(module: Any, table_full_bytes: int) -> None:
    """``handler(signal, info, context)``: what sigaction gets.

    ``table_full_bytes``: length of the text ``@table_full``, written to stderr when no
    entry is free for this thread.
    """
    f = Emitter(module, "handler", VOID, [I32, PTR, PTR], public=True)
    number, info, context = f.arguments
    errno = f.call_named("__errno_location")
    before = f.read(errno, 0, I32)
    sent = f.icmp_signed("<=", f.read(info, L.SI_CODE, I32), f.const(0, I32))

    def pass_on() -> None:
        f.write(before, errno)
        f.call_named("chain", number, info, context, sent)
        f.ret_void()

    with f.when(f.or_(sent, f.eq(control(f, S.C_ENABLED), 0))):
        pass_on()
    tid = system_call(f, L.SYS_GETTID)
    index = f.call_named("find_thread", tid)
    with f.when(f.icmp_signed("<", index, f.const(0))):
        text = f.module.get_global("table_full")
        system_call(f, L.SYS_WRITE, 2, text, table_full_bytes)
        pass_on()
    header = f.at(control(f, S.C_HEADERS, PTR), f.mul(index, f.const(L.HEADER_BYTES)))
    tiles = f.at(control(f, S.C_TILES, PTR), f.mul(index, f.const(L.DATA_BYTES)))
    f.write(f.add(f.read(header, L.H_TRAPS), f.const(1)), header, L.H_TRAPS)
    f.call_named("pull_frame", context, header, tiles)
    fault = f.space(L.FAULT_BYTES)
    f.write(0, fault, L.F_KIND)
    pid = f.read(header, L.H_PID)
    result = f.call_named("run", context, index, pid, fault)
    with f.when(f.eq(result, L.STEP_FOREIGN)):
        pass_on()
    with f.when(f.eq(result, L.STEP_FAULT)):
        kind = f.read(fault, L.F_KIND)
        with f.when(f.eq(kind, L.FAULT_UD)):
            # without permission Linux says ILL_ILLOPC, of a real #UD ILL_ILLOPN
            f.write(f.const(L.ILL_ILLOPN, I32), info, L.SI_CODE)
            pass_on()
    # not for the cases above: with permission the frame's TILECFG is the program's own
    f.call_named("push_frame", context, header)
    with f.when(f.eq(result, L.STEP_FAULT)):
        f.call_named("deliver", context, fault, pid, tid)
    f.write(before, errno)
    f.ret_void()
