"""load_model on mixtures of experts: the real exporters' fixtures, and families without one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from synthetic import write_tokenizer

import amxq
from amxq.errors import CheckpointError
from amxq.integrations.experts import Int4Experts
from amxq.quantization import pack_checkpoint
from amxq.quantization.experts import concatenate, stack_experts

FIXTURES = ("tiny-qwen3moe-ar-g128-sym", "tiny-mixtral-ar-g128-asym", "tiny-qwen2moe-awq-g32-asym")


@pytest.fixture(autouse=True)
def vectors() -> Iterator[None]:
    """The best target but AMX's, whose kernels take several times as long to compile; experts on
    all targets are tested in tests/ops."""
    amxq.set_target(next(t for t in amxq.available_targets() if t != "amx"))
    yield
    amxq.set_target(None)


def logits(model: Any, ids: torch.Tensor) -> np.ndarray:
    with torch.inference_mode():
        return np.asarray(model(input_ids=ids).logits.float().numpy())


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_of_the_exporters_fixtures(name: str, shared: Path) -> None:
    folder = shared / "fixtures" / "checkpoints" / name
    reference = np.load(folder / "ref.npz")
    few = 5  # tokens: experts with many rows are tested in tests/ops, and compile for long
    ids, want = torch.from_numpy(reference["input_ids"])[:, :few], reference["logits_fp32"][:, :few]
    model, _ = amxq.load_model(folder)
    assert np.abs(logits(model, ids) - want).max() < 0.1  # fp32 logits are of size 10
    assert any(isinstance(m, Int4Experts) for m in model.modules())
    if name == FIXTURES[0]:
        model, _ = amxq.load_model(folder, dtype=torch.float32)
        assert np.abs(logits(model, ids) - want).max() < 1e-4


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "intermediate_size": 32}),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 40,
            "intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "intermediate_size": 32, "head_dim": 32, "sliding_window": 8},
    ),
}


def quantised(
    tensor: torch.Tensor, group: int, order: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix [N, K] rounded to 4 bits: GPTQ's tensors (v1, symmetric), and its exact values.
    With ``order`` columns are in groups as act order leaves them, by chance of this seed."""
    N, K = tensor.shape
    groups = torch.arange(K) // group
    if order is not None:
        groups = groups[torch.randperm(K, generator=torch.Generator().manual_seed(order))]
    largest = torch.stack([tensor[:, groups == g].abs().amax(-1) for g in range(K // group)], 1)
    scales = (largest / 7).half()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    wide = scales.float()[:, groups]
    q = (tensor / wide).round().clamp(-8, 7)
    nibbles = (q.T.reshape(K // 8, 8, N).long() + 8) << (4 * torch.arange(8)[None, :, None])
    words = nibbles.sum(1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    zeros = torch.full((K // group, N // 8), 0x77777777, dtype=torch.int32)
    stored = {"qweight": words, "qzeros": zeros, "scales": scales.T.contiguous()}
    return stored | ({} if order is None else {"g_idx": groups.int()}), q * wide


def write_family(folder: Path, name: str, desc_act: bool = False) -> Any:
    """A model of random weights, experts quantised and stored one by one as exporters do; returns
    the model with the exact quantised values. With desc_act each expert has an order of its own,
    which gate and up share, as both see the same activations."""
    make, options = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**SIZES, **options))
    model = model.float().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
        parameter.data = parameter.data.bfloat16().float()
    tensors = dict(model.state_dict())
    for key, value in list(tensors.items()):
        if key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            _unfuse(tensors, key, value, model.get_submodule(key.rpartition(".")[0]), desc_act)
        elif key.endswith((".experts.gate_up_proj_bias", ".experts.down_proj_bias")):
            _unfuse_bias(tensors, key, value)
    folder.mkdir()
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    config["quantization_config"] |= {"desc_act": desc_act, "sym": True}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, False)
    return model


def _unfuse(
    tensors: dict[str, torch.Tensor], key: str, value: torch.Tensor, module: Any, desc_act: bool
) -> None:
    """One tensor of all experts into quantised ones of each; ``value`` becomes what they mean."""
    del tensors[key]
    stem, _, kind = key.rpartition(".")
    for e in range(value.shape[0]):
        whole = value[e].T if module.is_transposed else value[e]
        if kind == "down_proj":
            parts = {"down_proj": whole}
        elif module.is_concatenated:
            parts = dict(zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True))
        else:
            parts = {"gate_proj": whole[::2], "up_proj": whole[1::2]}
        for part, matrix in parts.items():
            stored, exact = quantised(matrix.clone(), 8, e if desc_act else None)
            matrix.copy_(exact)
            tensors |= {f"{stem}.{e}.{part}.{n}": t for n, t in stored.items()}


def _unfuse_bias(tensors: dict[str, torch.Tensor], key: str, value: torch.Tensor) -> None:
    del tensors[key]
    stem, _, kind = key.rpartition(".")
    for e in range(value.shape[0]):
        if kind == "down_proj_bias":
            tensors[f"{stem}.{e}.down_proj.bias"] = value[e]
        else:
            tensors[f"{stem}.{e}.gate_proj.bias"] = value[e, ::2]
            tensors[f"{stem}.{e}.up_proj.bias"] = value[e, 1::2]


@pytest.mark.parametrize(("name", "desc_act"), [*((n, False) for n in FAMILIES), ("olmoe", True)])
def test_families_without_a_fixture(name: str, desc_act: bool, tmp_path: Path) -> None:
    """fp32 logits of the packed model are those of transformers with the same values."""
    exact = write_family(tmp_path / name, name, desc_act)
    model, _ = amxq.load_model(tmp_path / name, dtype=torch.float32)
    ids = torch.tensor([[3, 9, 17, 40]])
    want = logits(exact, ids)
    assert np.abs(logits(model, ids) - want).max() < 1e-4 * np.abs(want).max()
    experts = [m for m in model.modules() if isinstance(m, Int4Experts)]
    assert len(experts) == (1 if name == "deepseek_v3" else 2)
    assert model.to(torch.bfloat16) is model and experts[0].w13_scales.dtype == torch.float16
    copy.deepcopy(experts[0])


def test_packed_checkpoint(tmp_path: Path) -> None:
    from amxq.quantization.packed_checkpoint import pack_checkpoint

    exact = write_family(tmp_path / "plain", "gpt_oss")
    pack_checkpoint(tmp_path / "plain", tmp_path / "packed")
    model, _ = amxq.load_model(tmp_path / "packed", dtype=torch.float32)
    ids = torch.tensor([[5, 6]])
    want = logits(exact, ids)
    assert np.abs(logits(model, ids) - want).max() < 1e-4 * np.abs(want).max()


def test_experts_quantised_in_part(tmp_path: Path) -> None:
    write_family(tmp_path / "m", "olmoe")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    stem = "model.layers.1.mlp.experts.2.up_proj"
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{stem}.{part}"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="3 quantised up matrices, expected 4.*expert 2"):
        amxq.load_model(tmp_path / "m")


def test_dense_experts_beside_quantised_ones(tmp_path: Path) -> None:
    """Experts of one layer in 16 bits, stored one by one."""
    exact = write_family(tmp_path / "m", "olmoe")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    experts = exact.model.layers[1].mlp.experts
    for e in range(4):
        gate, up = experts.gate_up_proj[e].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down_proj[e]}
        for part, matrix in parts.items():
            stem = f"model.layers.1.mlp.experts.{e}.{part}"
            for name in ("qweight", "qzeros", "scales"):
                del tensors[f"{stem}.{name}"]
            tensors[f"{stem}.weight"] = matrix.detach().clone()
    save_file(tensors, file)
    model, _ = amxq.load_model(tmp_path / "m", dtype=torch.float32)
    ids = torch.tensor([[3, 9]])
    want = logits(exact, ids)
    assert np.abs(logits(model, ids) - want).max() < 1e-4 * np.abs(want).max()


def test_unknown_activation_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "m", "olmoe")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["hidden_act"] = "relu"
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="activation"):
        amxq.load_model(tmp_path / "m")


def test_a_packed_checkpoint_holds_stacks(tmp_path: Path) -> None:
    """As one mapping each, of the values that single experts are stacked to."""
    write_family(tmp_path / "source", "olmoe")
    checkpoint = pack_checkpoint(tmp_path / "source", tmp_path / "packed")
    stem = "model.layers.1.mlp.experts"
    for parts in (("gate_proj", "up_proj"), ("down_proj",)):
        names = [[f"{stem}.{expert}.{part}" for part in parts] for expert in range(4)]
        stack = checkpoint.load_stack(names)
        assert stack is not None and stack.zeros is None
        singles = [[checkpoint.load_layer(name) for name in expert] for expert in names]
        joined = [concatenate(*e) if len(e) == 2 else e[0] for e in singles]
        for mine, theirs in zip(stack[:2], stack_experts(joined, 4)[:2], strict=True):
            assert isinstance(mine, torch.Tensor) and torch.equal(mine, theirs)
        assert checkpoint.load_stack(names[::-1]) is None
    source, packed = (amxq.load_model(tmp_path / name)[0] for name in ("source", "packed"))
    ids = torch.arange(5)[None]
    assert np.array_equal(logits(source, ids), logits(packed, ids))
