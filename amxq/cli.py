"""The command line: ``amxq generate``, ``inspect``, ``pack``, ``doctor``, ``cache``, ``explain``,
``bench``.

A mistake of the user (:class:`amxq.errors.AmxqError`, a missing extra) is one message on standard
error and exit code 2, without a traceback. Text goes to standard output, remarks to standard error.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import amxq
from amxq.errors import AmxqError, ArgumentError, CheckpointError

_DEFAULT_TOKENS = 128
_ROOT = Path(__file__).resolve().parents[1]  # of a source checkout, or site-packages

# `python -m benchmarks` would take a folder of that name in the current directory first.
_RUN_BENCHMARKS = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import benchmarks
benchmarks.PROGRAM = "amxq bench"
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None takes the process's own.

    Returns:
        the exit code: 0, 2 for a mistake of the user and for problems that the doctor found, 130
        when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:
        return _bench(words[1:])
    arguments, unknown = _parser().parse_known_args(words)
    if unknown:  # argparse would show the usage of amxq, not of the command
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    logging.basicConfig(format="amxq: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        code: int = arguments.run(arguments)
        return code
    except (AmxqError, ImportError) as error:
        print(f"amxq: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (head, less); nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amxq", description="INT4 language models on x86 CPUs.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"amxq {amxq.__version__}")
    parser.set_defaults(run=lambda arguments: _usage(parser), parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        help="continue a prompt with the model of a checkpoint folder",
        description="Continue a prompt with the model of a checkpoint folder (greedy decoding).",
        allow_abbrev=False,
    )
    generate.add_argument("folder", type=Path, help="a local checkpoint folder")
    generate.add_argument(
        "--prompt", type=_text, required=True, help="the text to answer or to continue"
    )
    generate.add_argument(
        "--max-new-tokens", type=_count, default=_DEFAULT_TOKENS, metavar="N", help="default 128"
    )
    generate.add_argument(
        "--target",
        metavar="T",
        help="amx, avx512_bf16, avx512, avx2 or auto, the best that this CPU runs; "
        "default: AMXQ_TARGET, and for AutoRound checkpoints else only AMX",
    )
    generate.add_argument(
        "--precision",
        choices=("bf16", "int8"),
        default="bf16",
        help="of INT4 layers: bf16 (default) takes activations as they are; int8 rounds them to 8 "
        "bits, which is less exact, and faster in long prompts",
    )
    generate.add_argument(
        "--head",
        choices=("int8",),
        help="int8: an unquantised head (lm_head) in 8 bits, which is less exact, and half of the "
        "bytes that a token reads of it; default: as it is",
    )
    generate.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the text as it comes (default) or at the end",
    )
    generate.add_argument("--threads", type=_count, metavar="N", help="default: as torch chooses")
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser(
        "inspect",
        help="show what is in a checkpoint folder and what would run",
        description="Show a checkpoint's layers, how each is stored and what would run it. "
        "Weights are not read. N×K is output × input features (E×N×K: experts); the target guard "
        "is what the checkpoint's format asks of this CPU (AutoRound: AMX, unless AMXQ_TARGET "
        "names a target). Exit code 0: the report is complete, whatever it says; 2: there is no "
        "checkpoint, or its weights cannot be read.",
        allow_abbrev=False,
    )
    inspect.add_argument("folder", type=Path, help="a local checkpoint folder")
    inspect.add_argument("--json", action="store_true", help="the report as JSON")
    inspect.add_argument("--all", action="store_true", help="one line for each layer")
    inspect.set_defaults(run=_inspect)

    pack = commands.add_parser(
        "pack",
        help="write a checkpoint's packed form, which loads faster",
        description="Write a checkpoint's packed form: its INT4 layers as the kernels of every "
        "target read them, loaded by mapping files.",
        allow_abbrev=False,
    )
    pack.add_argument("folder", type=Path, help="a local checkpoint folder")
    pack.add_argument("out", type=Path, help="a new folder")
    pack.set_defaults(run=_pack)

    doctor = commands.add_parser(
        "doctor", help="show what amxq finds on this machine", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="the report as JSON")
    doctor.set_defaults(run=_doctor)

    cache = commands.add_parser(
        "cache",
        help="show what the cache of compiled kernels holds, or empty it",
        allow_abbrev=False,
    )
    cache.add_argument("--clear", action="store_true", help="remove all objects")
    cache.set_defaults(run=_cache)

    explain = commands.add_parser(
        "explain",
        help="show what the compiler makes of an INT4 linear",
        description="Show the machine code of a symmetric INT4 linear, loop by loop. "
        "Any target, on any machine.",
        allow_abbrev=False,
    )
    explain.add_argument("--m", type=_count, default=128, help="rows of x (default 128)")
    explain.add_argument("--n", type=_count, default=4096, help="outputs (default 4096)")
    explain.add_argument("--k", type=_count, default=4096, help="inputs (default 4096)")
    explain.add_argument("--group", type=_count, default=128, help="group size (default 128)")
    explain.add_argument("--precision", choices=("bf16", "int8"), default="bf16")
    explain.add_argument("--target", default="amx", help="default amx")
    explain.set_defaults(run=_explain)

    commands.add_parser(
        "bench", help="run the benchmarks of a source checkout; arguments are passed on to them"
    )
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected some text")
    return text


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from amxq.integrations.generation import generate
    from amxq.integrations.loader import load_model
    from amxq.quantization.names import counted

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = load_model(
        arguments.folder,
        target=arguments.target,
        precision=arguments.precision,
        head=arguments.head,
    )
    made = generate(
        model,
        tokenizer,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        on_text=_print_piece if arguments.stream else None,
    )
    print("" if arguments.stream else made.text, flush=True)
    summary = model.amxq_summary
    print(
        f"\nprompt {counted(len(made.prompt_ids), 'token')}, {made.prompt_rate:.1f} tokens/s; "
        f"generation {counted(len(made.token_ids), 'token')}, {made.decode_rate:.1f} tokens/s\n"
        f"target {summary.target}, {counted(torch.get_num_threads(), 'thread')}; {summary}",
        file=sys.stderr,
    )
    return 0


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _inspect(arguments: argparse.Namespace) -> int:
    from amxq.quantization.inspect import inspect_checkpoint
    from amxq.quantization.inspect_text import render

    found = inspect_checkpoint(arguments.folder)
    text = json.dumps(found.as_dict(), indent=2) if arguments.json else None
    print(text or render(found, every_layer=arguments.all))
    if not found.method and not found.layers:
        raise CheckpointError(f"{str(arguments.folder)!r} is no checkpoint; see its problems above")
    if not found.readable:
        raise CheckpointError(
            f"the weights in {str(arguments.folder)!r} cannot be read; see the problems above"
        )
    return 0


def _pack(arguments: argparse.Namespace) -> int:
    from amxq.integrations.progress import Progress
    from amxq.quantization.packed_checkpoint import pack_checkpoint

    with Progress("packing") as progress:
        packed = pack_checkpoint(arguments.folder, arguments.out, on_layer=progress.step)
    print(f"{len(packed.quantized_layers())} layers packed into {arguments.out}", file=sys.stderr)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from amxq.runtime import doctor

    report = doctor.report()
    print(json.dumps(report, indent=2) if arguments.json else doctor.render(report))
    return 2 if report["problems"] else 0


def _cache(arguments: argparse.Namespace) -> int:
    from amxq.runtime import doctor
    from amxq.runtime.cache import open_cache
    from amxq.runtime.loader import kernel_of

    cache = open_cache()
    if arguments.clear:
        print(f"{cache.clear()} removed")
    print(doctor.cache_text())
    kinds = Counter(kernel_of(data) or "choices of the autotuner" for data in cache.payloads())
    for kind, count in sorted(kinds.items()):
        print(f"{count:6}  {kind}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    import torch

    from amxq.ops.schedule import PANEL, Operands, plan
    from amxq.runtime.targets import check_name

    bf16, group = torch.bfloat16, arguments.group
    if arguments.k % group or group % 8:
        raise ArgumentError(f"--group {group}: expected a multiple of 8 that divides --k")
    target = check_name(arguments.target).name
    sizes = (arguments.m, arguments.k, -(-arguments.n // PANEL), group)
    planned = plan(*sizes, target, Operands(bf16, zeros=False), bf16, arguments.precision)
    print(amxq.explain(planned.kernel))
    return 0


def _bench(words: list[str]) -> int:
    """Hand over to ``python -m benchmarks``, which only a source checkout has."""
    if not (_ROOT / "benchmarks" / "__main__.py").is_file():
        print(
            "amxq: error: the benchmarks are not part of the installed package; run amxq bench "
            "from a source checkout, installed with pip install -e '.[bench]'",
            file=sys.stderr,
        )
        return 2
    command = [sys.executable, "-c", _RUN_BENCHMARKS, str(_ROOT), *words]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
