"""Numbers shared by the generated handler and the Python around it.

Two kinds: what Linux and glibc on x86-64 fix (ucontext, siginfo, system calls), and the
layout of the emulator's own tables, which only this package knows.
"""

from __future__ import annotations

# ucontext_t: uc_flags, uc_link, uc_stack, then uc_mcontext.gregs at 40, 8 bytes each
GREGS = 40
REG_RIP = GREGS + 8 * 16
FPREGS = GREGS + 8 * 23  # pointer to the FXSAVE image, with the XSAVE area behind it
SIGMASK = 296  # uc_sigmask, of which the kernel uses 8 bytes
# gregs index of each register number as instructions encode it (rax, rcx, rdx, rbx, rsp ...)
GREG_OF_REGISTER = (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)

# FXSAVE image: software bytes from 464 tell the features the kernel saved
FX_FEATURES = 464 + 8
FX_XSTATE_BV = 512
# offset of TILECFG in a standard-format XSAVE area: CPUID.(0DH,17):EBX, 2752 on every CPU so far
FX_TILECFG = 2752
TILECFG_FEATURE = 1 << 17

SI_CODE, SI_ADDR = 8, 16
ILL_ILLOPN, SEGV_MAPERR, SEGV_ACCERR, SI_KERNEL = 2, 1, 2, 128
SIGILL, SIGBUS, SIGSEGV = 4, 7, 11
SA_SIGINFO, SA_NODEFER, SA_RESTART = 0x4, 0x40000000, 0x10000000
SIG_DFL, SIG_IGN = 0, 1

SYS_WRITE = 1
SYS_RT_SIGACTION, SYS_RT_SIGPROCMASK, SYS_MINCORE, SYS_MADVISE = 13, 14, 27, 28
SYS_GETPID, SYS_GETTID, SYS_TGKILL, SYS_ARCH_PRCTL = 39, 186, 234, 158
SYS_RT_TGSIGQUEUEINFO, SYS_READV, SYS_WRITEV = 297, 310, 311  # the last two: process_vm_*
ARCH_GET_FS, ARCH_GET_GS, ARCH_GET_XCOMP_PERM = 0x1003, 0x1004, 0x1022

# the instructions, in the order of their numbers; 0 means "not one of ours"
KINDS = (
    "LDTILECFG",
    "STTILECFG",
    "TILERELEASE",
    "TILEZERO",
    "TILELOADD",
    "TILELOADDT1",
    "TILESTORED",
    "TDPBF16PS",
    "TDPFP16PS",
    "TDPBSSD",
    "TDPBSUD",
    "TDPBUSD",
    "TDPBUUD",
)
NUMBER = {name: i + 1 for i, name in enumerate(KINDS)}

# one thread's header: who owns it, its TILECFG, how much it executed
SLOTS = 4096
HEADER_BYTES = 256
H_OWNER, H_PID, H_CONFIG, H_COUNTS, H_TRAPS = 0, 8, 64, 128, 248
TILE_BYTES, TILES = 1024, 8
DATA_BYTES = TILES * TILE_BYTES
# the owner word: FS base (64-byte aligned, below 2**47) without its low 6 bits, then the tid
TID_BITS = 22

# byte 1 of TILECFG in a signal frame, put there to see whether the CPU itself loaded another
MARK = 0xA5

# a decoded instruction, 8 bytes a field
(
    I_KIND,
    I_LENGTH,
    I_TILE_C,
    I_TILE_A,
    I_TILE_B,
    I_ADDRESS,
    I_STRIDE,
    I_SEGMENT_BASE,
    I_MASK,
    I_STACK,
) = range(0, 80, 8)
INSTRUCTION_BYTES = 80

# a fault: what kind, the address, whether it was a write
F_KIND, F_ADDRESS = 0, 8
FAULT_BYTES = 16
FAULT_UD, FAULT_GP, FAULT_SS, FAULT_PAGE = 1, 2, 3, 4

# what one step did
STEP_FOREIGN, STEP_DONE, STEP_FAULT = 0, 1, 2
