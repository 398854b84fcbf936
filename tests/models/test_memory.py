"""Loading a model takes about the memory of the loaded model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from synthetic import write_checkpoint

# Everything that is imported on the way is warmed up by a small model, then the peak is reset.
MEASURE = """
import re, sys
import amxq

def status(key):
    text = open("/proc/self/status").read()
    return int(re.search(key + r":\\s+(\\d+) kB", text)[1]) * 1024

amxq.load_model(sys.argv[1], target="auto")
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
model, _ = amxq.load_model(sys.argv[2], target="auto")
summary = model.amxq_summary
print(status("VmHWM") - before, summary.packed_bytes, summary.plain_bytes)
"""


def test_peak_is_near_the_packed_size(tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small")
    # 134 million weights in 4 bits, about the demo's model.
    large = write_checkpoint(
        tmp_path / "large", hidden=1024, intermediate=4096, layers=8, vocab=16384
    )
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    grown, packed, plain = map(int, output.split())
    assert 60e6 < packed < 90e6
    # Above the result there is one layer's checkpoint tensors (2 MB here), their unpacked form,
    # and what the allocator keeps; holding the whole file beside the result would double it.
    assert grown < 1.35 * (packed + plain), f"{grown / 1e6:.0f} MB for {packed / 1e6:.0f} MB"
