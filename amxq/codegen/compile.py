"""LLVM IR text to object code, through llvmlite."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

from amxq.runtime.targets import Target


@lru_cache(maxsize=1)
def binding() -> Any:
    """llvmlite's binding with the x86 back end initialised. Importing it takes up to 150 ms,
    so it is done when something is compiled."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    return llvm


def compiler_version() -> str:
    """The version of llvmlite, which fixes LLVM's, as part of the key of cached objects."""
    return f"llvmlite {version('llvmlite')}"


def target_machine(target: Target) -> Any:
    llvm = binding()
    triple = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    # Position-independent: amxq.runtime.loader puts an object anywhere.
    return triple.create_target_machine(
        cpu=target.llvm_cpu, features=target.llvm_features, opt=3, reloc="pic", codemodel="small"
    )


def optimise(text: str, target: Target) -> tuple[Any, Any]:
    """Parses, verifies and optimises a module; returns (module, target machine).

    The schedule is ours, so LLVM neither unrolls nor vectorises: it simplifies, hoists and
    allocates registers.
    """
    llvm = binding()
    machine = target_machine(target)
    module = llvm.parse_assembly(text)
    module.triple = "x86_64-unknown-linux-gnu"
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False
    options.loop_vectorization = False
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine
