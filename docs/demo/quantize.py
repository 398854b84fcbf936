"""The model in INT4, made by AutoRound's real exporter, without network and without a compiler."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

SAMPLES = 16
TOKENS_A_SAMPLE = 128
GROUP_SIZE = 64  # SmolLM2's hidden size is 576 = 9 x 64; 128 would leave a short last group


def quantise(source: Path, folder: Path) -> Path:
    """Write the INT4 checkpoint of the model in `source`; returns at once if it is there.

    Round to nearest with scales searched on calibration text (``iters=0``): two minutes on two
    cores for 135 million parameters. AutoRound shows its own progress bar.
    """
    if folder.exists():
        return folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("AR_LOG_LEVEL", "ERROR")  # leave the screen to its progress bar
    from auto_round import AutoRound

    work = folder.with_suffix(".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    print("quantising to INT4 with AutoRound (some two minutes, once)", flush=True)
    rounding = AutoRound(
        str(source),
        scheme="W4A16",
        group_size=GROUP_SIZE,
        sym=True,
        iters=0,
        nsamples=SAMPLES,
        seqlen=TOKENS_A_SAMPLE,
        dataset=str(calibration_text(work / "calibration.json")),
        enable_torch_compile=False,  # it would need a C++ compiler
    )
    rounding.quantize_and_save(str(work / "out"), format="auto_round")
    # The exporter makes a folder named after the model inside the one it is given.
    config = next((work / "out").rglob("config.json"))
    config.parent.rename(folder)
    shutil.rmtree(work)
    return folder


def calibration_text(file: Path) -> Path:
    """Write English text that every Python has with it: the longest pages of help()."""
    from pydoc_data.topics import topics

    pages = sorted(topics.values(), key=len, reverse=True)[: SAMPLES + SAMPLES // 2]
    file.write_text(json.dumps(pages), encoding="utf-8")
    return file
