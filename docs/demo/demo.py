"""``make demo``: a language model from the package index to INT4 to text, and how exact that is.

    python docs/demo/demo.py [--target auto] [--max-new-tokens 96] [--prompt TEXT]

Everything that takes time is kept below .demo/, so that a second run only generates.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import agreement
import quantize
import smollm2

CACHE = Path(__file__).resolve().parents[2] / ".demo"
PROMPT = "Explain in a few sentences why the sky is blue."


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct in INT4 on amxq.")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--prompt", default=PROMPT)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing below may ask a hub
    folder = checkpoint()
    return run(folder, arguments.prompt, arguments.target, arguments.max_new_tokens)


def checkpoint() -> Path:
    """The INT4 checkpoint, made at the first call. Raises RuntimeError if it cannot be."""
    final = CACHE / "smollm2-int4-g64"
    if not final.exists():
        plain = smollm2.convert(smollm2.fetch_gguf(CACHE), CACHE / "smollm2-bf16")
        quantize.quantise(plain, final)
    return final


def run(folder: Path, prompt: str, target: str, count: int) -> int:
    """Generate, and print what was asked for, what ran, how fast, and how exact."""
    import torch

    import amxq
    from amxq.integrations.generation import generate

    print(f"asking for target {target!r} explicitly (unasked, AutoRound models need AMX)")
    begin = time.perf_counter()
    model, tokenizer = amxq.load_model(folder, target=target)
    print(f"loaded and packed in {time.perf_counter() - begin:.1f} s")
    print(model.amxq_summary)
    print(f"\nprompt: {prompt}\n")
    # Kernels are compiled, or taken from the cache, at their first call: not part of the speed.
    generate(model, tokenizer, prompt, max_new_tokens=2)
    made = generate(
        model,
        tokenizer,
        prompt,
        max_new_tokens=count,
        on_text=lambda piece: print(piece, end="", flush=True),
        keep_logits=True,
    )
    print(
        f"\n\nprompt      {len(made.prompt_ids)} tokens, {made.prompt_rate:.1f} tokens/s\n"
        f"generation  {len(made.token_ids)} tokens, {made.decode_rate:.1f} tokens/s\n"
        f"target      {model.amxq_summary.target}",
        flush=True,
    )
    print("agreement with the checkpoint dequantised to fp32 in plain torch:")
    reference = agreement.plain_model(folder)
    found = agreement.compare(reference, made.prompt_ids, made.token_ids, made.logits)
    print(f"  amxq in bf16: {found}")
    exact, _ = amxq.load_model(folder, target=target, dtype=torch.float32)
    again = generate(exact, tokenizer, prompt, max_new_tokens=count, keep_logits=True)
    found = agreement.compare(reference, again.prompt_ids, again.token_ids, again.logits)
    print(f"  amxq in fp32: {found}")
    rounding = agreement.error_of_bf16(reference, made.prompt_ids, made.token_ids)
    print(f"  for comparison, plain torch in bf16: largest logit difference {rounding:.4f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:  # TargetError and the demo's own are RuntimeErrors
        sys.exit(f"demo: {error}")
