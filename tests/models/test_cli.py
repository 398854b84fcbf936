"""The command line, in processes of its own: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from synthetic import write_checkpoint

import amxq
import amxq.language as tl
from amxq import cli


def amxq_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amxq", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model")))


def test_generate_streams_text_and_reports(folder: str) -> None:
    done = amxq_command(
        "generate", folder, "--prompt", "the cat sat", "--max-new-tokens", "6",
        "--target", "auto", "--threads", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "prompt 3 tokens, " in done.stderr and "generation 6 tokens, " in done.stderr
    assert f"target {amxq.available_targets()[0]}, 1 thread; 14 layers on amxq" in done.stderr
    assert "unquantised: lm_head: " in done.stderr


def test_generate_without_streaming_prints_the_same(folder: str) -> None:
    words = ("generate", folder, "--prompt", "sky is", "--max-new-tokens", "5", "--target", "auto")
    words += ("--precision", "int8", "--head", "int8")
    streamed, whole = amxq_command(*words, "--stream"), amxq_command(*words, "--no-stream")
    assert streamed.returncode == whole.returncode == 0, streamed.stderr + whole.stderr
    assert streamed.stdout == whole.stdout


def test_generate_on_a_real_exporters_checkpoint(shared: Path) -> None:
    folder = shared / "fixtures" / "checkpoints" / "ar-ar-g32-sym"
    words = ("--prompt", "Return the", "--max-new-tokens", "8", "--target", "auto")
    done = amxq_command("generate", str(folder), *words)
    assert done.returncode == 0, done.stderr
    assert "14 layers on amxq" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "/no/such/folder", "--prompt", "x"), "'/no/such/folder' is not a folder"),
        (("generate", "FOLDER", "--prompt", "x", "--target", "mmx"), "mmx"),
        (("generate", "FOLDER", "--prompt", " ", "--target", "auto"), "' ' has no tokens"),
    ],
)
def test_mistakes_are_one_message(folder: str, words: tuple[str, ...], message: str) -> None:
    done = amxq_command(*(folder if word == "FOLDER" else word for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith("amxq: error: ") and message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-new-tokens", "0"), "--max-new-tokens: '0' is not a whole number of 1 or more"),
        (("--max-new-tokens", "-3"), "--max-new-tokens: '-3' is not a whole number of 1 or more"),
        (("--threads", "many"), "--threads: 'many' is not a whole number of 1 or more"),
        (("--prompt", ""), "--prompt: expected some text"),
        (("--temperature", "1"), "unrecognized arguments: --temperature 1"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["generate", "no-folder", "--prompt", "x", *words])
    said = capsys.readouterr().err
    assert done.value.code == 2 and said.startswith("usage: amxq generate [-h] --prompt PROMPT")
    assert "amxq generate: error: " in said and message in said


def test_environment_that_is_no_target(folder: str) -> None:
    done = amxq_command("generate", folder, "--prompt", "the", AMXQ_TARGET="mmx")
    assert done.returncode == 2
    assert "AMXQ_TARGET" in done.stderr and "Traceback" not in done.stderr


def test_doctor() -> None:
    text = amxq_command("doctor")
    assert text.returncode == 0, text.stderr
    assert "AMX" in text.stdout and "Kernel cache" in text.stdout
    wrong = amxq_command("doctor", AMXQ_TARGET="sse9")
    assert wrong.returncode == 2
    assert wrong.stdout.endswith("expected one of amx, avx512_bf16, avx512, avx2, or auto\n")
    report = json.loads(amxq_command("doctor", "--json").stdout)
    assert {"cpu", "amx", "targets", "threads", "cache", "versions"} <= set(report)


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from amxq.runtime.cache import ObjectCache, make_key
    from amxq_kernels.int4_linear import block_sums

    folder = tmp_path / "objects"
    monkeypatch.setenv("AMXQ_CACHE_DIR", str(folder))
    types = (torch.bfloat16, torch.float32, tl.int32, tl.int32)
    image = block_sums.warmup(*types, SPLITS=1, BLOCK_K=32, target="avx2").asm["obj"]
    ObjectCache(folder).clear()
    for i, payload in enumerate((image, image, b"{}")):
        ObjectCache(folder).put(make_key(i), payload)
    (folder / "no key.amxqobj").write_bytes(b"")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1024

    shown = amxq_command("cache")
    assert shown.returncode == 0, shown.stderr
    head = f"{folder}\n4 objects, {size:.1f} KiB of 256 MiB\n"
    assert shown.stdout == head + "     2  block_sums\n     1  choices of the autotuner\n"
    cleared = amxq_command("cache", "--clear")
    assert cleared.stdout == f"4 removed\n{folder}\n0 objects, 0 bytes of 256 MiB\n"
    assert not list(folder.iterdir())


def test_inspecting_what_is_no_checkpoint(tmp_path: Path) -> None:
    for words in ((), ("--json",)):
        done = amxq_command("inspect", str(tmp_path), *words)
        assert done.returncode == 2 and "is no checkpoint" in done.stderr
        assert "holds no quantization_config" in done.stdout


def test_version() -> None:
    assert amxq_command("--version").stdout == f"amxq {amxq.__version__}\n"


def test_bench_runs_the_benchmarks_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--help"]) == 0
    assert capfd.readouterr().out.startswith("usage: amxq bench WHAT [--help]\n")
    assert cli.main(["bench", "figures", "--help"]) == 0
    assert capfd.readouterr().out.startswith("usage: amxq bench figures [-h]")
    assert cli.main(["bench", "nothing"]) == 2
    assert capfd.readouterr().err.startswith("there is no benchmark 'nothing'\n\nusage: amxq bench")
    monkeypatch.setattr(cli, "_ROOT", tmp_path)
    assert cli.main(["bench", "--quick"]) == 2
    assert "source checkout" in capfd.readouterr().err


def test_no_command_shows_the_usage() -> None:
    done = amxq_command()
    assert done.returncode == 2
    assert "generate" in done.stderr and "doctor" in done.stderr and "bench" in done.stderr
