"""load_model on tiny random models of many families, compared with plain torch in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_maker import write_quantised

import amxq
from amxq.errors import CheckpointError
from amxq.quantization import pack_checkpoint

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
NO_HEAD_DIM = {key: value for key, value in SMALL.items() if key != "head_dim"}
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def causal(config: Any) -> Any:
    return hf.AutoModelForCausalLM.from_config(config)


def llava() -> Any:
    text = hf.LlamaConfig(**SMALL)
    vision = hf.CLIPVisionConfig(**VISION, projection_dim=32)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    return hf.LlavaForConditionalGeneration(config)


def gemma3_vision() -> Any:
    text = hf.Gemma3TextConfig(**SMALL, layer_types=["full_attention", "sliding_attention"])
    vision = hf.SiglipVisionConfig(**VISION)
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return hf.Gemma3ForConditionalGeneration(config)


def qwen25_vision() -> Any:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(
            text_config={**NO_HEAD_DIM, "rope_parameters": rope},
            vision_config={**vision, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
        )
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: causal(hf.LlamaConfig(**SMALL)),
    "llama-tied": lambda: causal(hf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "mistral": lambda: causal(hf.MistralConfig(**SMALL)),
    "qwen2": lambda: causal(hf.Qwen2Config(**SMALL)),
    "qwen3": lambda: causal(hf.Qwen3Config(**SMALL)),
    "gemma2": lambda: causal(hf.Gemma2Config(**SMALL)),
    "gemma3": lambda: causal(hf.Gemma3TextConfig(**SMALL)),
    "phi3": lambda: causal(hf.Phi3Config(**SMALL)),
    "gpt-neox": lambda: causal(hf.GPTNeoXConfig(**NO_HEAD_DIM)),
    "gpt2": lambda: causal(hf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=1)),
    "llava": llava,
    "gemma3-vision": gemma3_vision,
    "qwen2.5-vision": qwen25_vision,
}
#: Where a family's layers are not below "layers", or those of the vision part are too.
INSIDE = {"gpt2": ".h."} | dict.fromkeys(
    ("llava", "gemma3-vision", "qwen2.5-vision"), "language_model.layers"
)


@pytest.fixture(autouse=True)
def target_as_before() -> Iterator[None]:
    yield
    amxq.set_target(None)


def make(family: str) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]().float().eval()
    for parameter in model.parameters():  # biases and norms that matter
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2, 22).reshape(2, 10)
    with torch.inference_mode():
        return model(input_ids=ids).logits.float()  # type: ignore[no-any-return]


def check(folder: Path, model: Any, layers: int | None = None) -> Any:
    loaded, _ = amxq.load_model(folder, target="auto", dtype=torch.float32)
    assert type(loaded) is type(model)
    count = sum(isinstance(m, amxq.Int4Linear) for m in loaded.modules())
    assert count == layers if layers else count > 0
    expected = logits(model)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=2e-4)
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_family(tmp_path: Path, family: str) -> None:
    model = write_quantised(make(family), tmp_path, inside=INSIDE.get(family, "layers"))
    loaded = check(tmp_path, model)
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    if family not in INSIDE:
        assert list(loaded.amxq_summary.unquantised) == ["lm_head"]


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq", "auto-round", "compressed-tensors"])
def test_every_method(tmp_path: Path, method: str, sym: bool, scales: torch.dtype) -> None:
    model = make("llama")
    write_quantised(model, tmp_path, method=method, sym=sym, scales=scales, shards=3)
    check(tmp_path, model, 14)


def test_packed_form_of_a_model(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "packed"
    source.mkdir()
    model = write_quantised(make("qwen2"), source, sym=False, method="awq", shards=2)
    pack_checkpoint(source, out, shard_bytes=20_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    (source / "model-1.safetensors").unlink()
    check(out, model, 14)


def test_files_without_the_models_prefix(tmp_path: Path) -> None:
    model = make("gpt2")
    write_quantised(
        model, tmp_path, inside=".h.", rename=lambda name: name.removeprefix("transformer.")
    )
    check(tmp_path, model, 8)


def older_llava(name: str) -> str:
    name = name.replace("model.language_model.", "language_model.model.")
    if name.startswith("lm_head"):
        name = f"language_model.{name}"
    for part in ("vision_tower", "multi_modal_projector"):
        name = name.replace(f"model.{part}", part)
    return name


def older_qwen(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


@pytest.mark.parametrize(
    ("family", "older"), [("llava", older_llava), ("qwen2.5-vision", older_qwen)]
)
def test_names_of_older_transformers(
    tmp_path: Path, family: str, older: Callable[[str], str]
) -> None:
    model = make(family)
    write_quantised(model, tmp_path, inside="language_model.layers", rename=older)
    check(tmp_path, model, 14)


def test_quantised_head(tmp_path: Path) -> None:
    def as_in_files(name: str) -> str:
        return name.replace("lm_head", "embed_out")

    model = make("gpt-neox")
    write_quantised(model, tmp_path, inside="lm_head", rename=as_in_files)
    check(tmp_path, model, 1)


def test_missing_and_leftover_tensors_come_with_the_nearest_names(tmp_path: Path) -> None:
    model = make("llama")
    write_quantised(model, tmp_path, rename=lambda name: name.replace("model.norm", "model.nrom"))
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensors .*model\.norm\.weight; did you mean 'model\.nrom"
    ):
        amxq.load_model(tmp_path, target="auto")


def test_layers_that_cannot_be_replaced(tmp_path: Path) -> None:
    model = make("llama")
    write_quantised(model, tmp_path, rename=lambda name: name.replace("up_proj", "up_prj"))
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.up_prj'.*did you mean '.*up_p"):
        amxq.load_model(tmp_path, target="auto")
