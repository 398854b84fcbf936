"""How far amxq is from the same checkpoint, dequantised to fp32, in plain torch.

Nothing of amxq is used here, so that an error of its reader would show as well as one of its
kernels: the packed tensors are unpacked by a few lines of torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Agreement:
    """What :func:`compare` found.

    Attributes:
        tokens: how many tokens were compared.
        first_difference: index of the first token that plain torch would have chosen otherwise.
        gap: there, by how much plain torch prefers its own token (difference of the logits).
        worst: largest difference of a logit, over the positions up to the first difference.
        deviation: standard deviation of plain torch's logits, to judge `worst` by.
    """

    tokens: int
    first_difference: int | None
    gap: float
    worst: float
    deviation: float

    def __str__(self) -> str:
        if self.first_difference is None:
            text = f"all {self.tokens} greedy tokens identical"
        else:
            text = (
                f"first {self.first_difference} of {self.tokens} greedy tokens identical, then "
                f"plain torch prefers another by a logit gap of {self.gap:.4f}"
            )
        return (
            f"{text}; largest logit difference {self.worst:.4f} "
            f"(standard deviation of the logits {self.deviation:.2f})"
        )


def compare(
    reference: Any, prompt: list[int], tokens: list[int], logits: list[torch.Tensor]
) -> Agreement:
    """Judge `tokens`, generated greedily from `logits` (rows [V]), by the reference model."""
    rows = rows_for(reference, prompt, tokens)
    choice = rows.argmax(-1)
    differing = (choice != torch.tensor(tokens)).nonzero().flatten().tolist()
    first = differing[0] if differing else None
    gap = 0.0
    if first is not None:
        gap = float(rows[first, choice[first]] - rows[first, tokens[first]])
    count = len(tokens) if first is None else first + 1
    worst = float((rows[:count] - torch.stack(logits[:count])).abs().max())
    return Agreement(len(tokens), first, gap, worst, float(rows.std()))


def rows_for(reference: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The fp32 logits [len(tokens), V] from which `reference` would choose each token.

    One pass over prompt and tokens gives them all: what comes before each is the same.
    """
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens[:-1]])
        rows: torch.Tensor = reference(input_ids=ids).logits[0, len(prompt) - 1 :].float()
    return rows


def error_of_bf16(reference: Any, prompt: list[int], tokens: list[int]) -> float:
    """Largest logit difference of plain torch in bf16 to itself in fp32: the scale of rounding.

    `reference` is in bf16 afterwards.
    """
    exact = rows_for(reference, prompt, tokens)
    return float((rows_for(reference.bfloat16(), prompt, tokens) - exact).abs().max())


def plain_model(folder: Path) -> Any:
    """The checkpoint as an ordinary fp32 transformers model: AutoRound's GPTQ packing, 4 bits."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    for name in [n for n in tensors if n.endswith(".qweight")]:
        stem = name.removesuffix(".qweight")
        parts = (tensors.pop(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
        tensors[f"{stem}.weight"] = dequantise(*parts)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if unexpected or set(missing) - set(tied):
        raise RuntimeError(f"{folder} does not fit its config.json: {missing} {unexpected}")
    model.tie_weights()
    return model.eval()


def dequantise(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int32 [K/8, N], int32 [G, N/8], fp16 [G, N] -> fp32 [N, K]; zeros are stored minus one."""
    shifts = torch.arange(0, 32, 4)
    q = ((qweight[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, qweight.shape[1])
    z = ((qzeros[:, :, None] >> shifts) & 15).reshape(len(scales), -1) + 1
    group = q.shape[0] // len(scales)
    z, s = (t.repeat_interleave(group, 0) for t in (z, scales.float()))
    return ((q - z) * s).T.contiguous()
