"""load_model on the real exporters' fixtures: logits, guards, and checkpoints that do not fit."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import amxq
from amxq.errors import ArgumentError, CheckpointError, QuantizationConfigError, TargetError
from amxq.integrations.modules import Int8Linear
from amxq.runtime import targets

#: 4-bit folders of the AutoRound, GPTQ and AWQ exporters for tiny-llama and tiny-qwen2.
FIXTURES = (
    "ar-ar-g128-sym",
    "ar-ar-g32-asym",
    "ar-ar-g32-sym",
    "ar-ar-gch-asym",
    "ar-ar-gptq-g32-asym",
    "ar-ar-gptqmodel-g32-asym",
    "ar-llmc-g32-asym",
    "ar-awq-g32-asym",
    "ar-gptq-g32-sym",
    "autoawq-gemm-g32",
    "gm-awq-gemm-g32-asym",
    "gm-v1-g32-sym-act",
    "gm-v2-g32-asym-act",
    "lc-gptq-w4a16-g32-sym",
    "lmhead-ar-g32-sym",
    "lmhead-awq-g32-sym",
    "mix16-awq-g32-asym",
)
PLAIN = "ar-ar-g32-sym"

#: Odd sizes, extreme weights, old exporters: their fp32 logits are exact too.
MORE_FIXTURES = (
    "edge-ar-g32-asym-i0",
    "edge-ar-g32-sym-i5",
    "edge-gptq-g32-asym-i5",
    "gm-edge-v1-g32-asym-act",
    "lmheadrtn2-ar-g32-sym",
    "odd-ar-g128-sym",
    "odd-gptq-g64-sym",
    "oldv042-ar-g32-asym",
    "oldv042-ar-g32-sym",
)


@pytest.fixture
def fixture(shared: Path) -> Callable[[str], Path]:
    return lambda name: shared / "fixtures" / "checkpoints" / name


@pytest.fixture
def folder(fixture: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the plain fixture that a test may damage."""
    return Path(shutil.copytree(fixture(PLAIN), tmp_path / PLAIN, copy_function=shutil.copyfile))


def logits(
    folder: Path, dtype: torch.dtype, precision: str = "bf16"
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """amxq's logits [1, T, V] in fp32, and the references of the fixture."""
    reference = dict(np.load(folder / "ref.npz"))
    model, _ = amxq.load_model(folder, target="auto", dtype=dtype, precision=precision)
    with torch.inference_mode():
        found = model(input_ids=torch.from_numpy(reference["input_ids"])).logits
    return found.float().numpy(), reference


@pytest.fixture(autouse=True)
def target_as_before() -> Iterator[None]:
    """load_model(target=...) chooses for the process; no test may leave that to the next."""
    yield
    amxq.set_target(None)


@pytest.mark.parametrize("name", FIXTURES + MORE_FIXTURES)
def test_logits_fp32(fixture: Callable[[str], Path], name: str) -> None:
    found, reference = logits(fixture(name), torch.float32)
    np.testing.assert_allclose(found, reference["logits_fp32"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_bf16(fixture: Callable[[str], Path], name: str) -> None:
    # The fixtures' own loaders are off by 0.03 to 0.1 in their dtype, at logits of deviation 3.
    found, reference = logits(fixture(name), torch.bfloat16)
    difference = np.abs(found - reference["logits_fp32"])
    assert difference.max() < 0.1
    assert np.sqrt((difference**2).mean()) < 0.02


@pytest.mark.parametrize("name", FIXTURES[:1])
def test_logits_int8(fixture: Callable[[str], Path], name: str) -> None:
    found, reference = logits(fixture(name), torch.float32, "int8")
    difference = np.linalg.norm(found - reference["logits_fp32"])
    assert 1e-4 < difference / np.linalg.norm(reference["logits_fp32"]) < 0.02


def test_head_in_int8(fixture: Callable[[str], Path]) -> None:
    folder = fixture("ar-ar-g128-sym")  # its head is tied to the embedding
    plain, _ = amxq.load_model(folder, target="auto", dtype=torch.float32)
    model, _ = amxq.load_model(folder, target="auto", dtype=torch.float32, head="int8")
    assert type(model.lm_head) is Int8Linear
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    model.tie_weights()
    ids = torch.arange(3, 11)[None]
    with torch.inference_mode():
        got, want = model(ids).logits, plain(ids).logits
    assert 1e-3 < (got - want).norm() / want.norm() < 0.01
    assert str(model.amxq_summary).startswith("14 layers and lm_head (8 bits) on amxq (")
    assert "0 linear layers unquantised" in str(model.amxq_summary)
    more = model.amxq_summary.packed_bytes - plain.amxq_summary.packed_bytes
    assert more == model.lm_head.nbytes
    with pytest.raises(ArgumentError, match="'int4'"):
        amxq.load_model(folder, target="auto", head="int4")


def test_summary(fixture: Callable[[str], Path]) -> None:
    model, _ = amxq.load_model(fixture("mix16-awq-g32-asym"), target="auto")
    summary = model.amxq_summary
    int4 = [n for n, m in model.named_modules() if isinstance(m, amxq.Int4Linear)]
    assert list(summary.amxq_layers) == int4
    assert set(summary.unquantised) == {"lm_head", "model.layers.1.self_attn.v_proj"}
    assert all("16 bits" in why for why in summary.unquantised.values())
    assert summary.target == amxq.get_target()
    text = str(summary)
    assert text.startswith("13 layers on amxq")
    assert "unquantised: model.layers.1.self_attn.v_proj, lm_head: " in text


def test_model_is_for_inference(fixture: Callable[[str], Path]) -> None:
    model, tokenizer = amxq.load_model(fixture(PLAIN), target="auto")
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    ids = tokenizer("the", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= ids.shape[1] + 3


def test_tied_head_shares_the_embedding(fixture: Callable[[str], Path]) -> None:
    model, _ = amxq.load_model(fixture("ar-ar-g128-sym"), target="auto")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.amxq_summary.unquantised["lm_head"] == "it shares 'model.embed_tokens.weight'"


def test_rotary_frequencies_are_computed(fixture: Callable[[str], Path]) -> None:
    model, _ = amxq.load_model(fixture(PLAIN), target="auto")
    frequencies = model.model.rotary_emb.inv_freq
    size = model.config.hidden_size // model.config.num_attention_heads
    theta = model.config.rope_parameters["rope_theta"]
    expected = 1.0 / theta ** (torch.arange(0, size, 2) / size)
    torch.testing.assert_close(frequencies, expected)


class TestStrictGuard:
    """AutoRound without AMX: refused unless somebody asks for another target."""

    @pytest.fixture(autouse=True)
    def no_amx(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AMXQ_TARGET", raising=False)
        rest = [name for name in targets.available_targets() if name != "amx"]
        monkeypatch.setattr(targets, "available_targets", lambda: rest)

    def test_refuses_and_names_the_way_out(self, fixture: Callable[[str], Path]) -> None:
        with pytest.raises(QuantizationConfigError, match="AMXQ_TARGET=auto"):
            amxq.load_model(fixture(PLAIN))

    def test_the_argument_asks(self, fixture: Callable[[str], Path]) -> None:
        amxq.load_model(fixture(PLAIN), target="auto")

    def test_the_environment_asks(
        self, fixture: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AMXQ_TARGET", "auto")
        amxq.load_model(fixture(PLAIN))

    def test_other_methods_are_not_refused(self, fixture: Callable[[str], Path]) -> None:
        amxq.load_model(fixture("ar-gptq-g32-sym"))


def test_target_is_kept_only_on_success(folder: Path) -> None:
    best = amxq.available_targets()[-1]
    amxq.load_model(folder, target=best)
    assert amxq.get_target() == best
    amxq.set_target(None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        amxq.load_model(folder, target=best)
    assert targets.requested_target() != best or len(amxq.available_targets()) == 1


def test_unknown_target(folder: Path) -> None:
    with pytest.raises(TargetError, match="sse2"):
        amxq.load_model(folder, target="sse2")


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_missing_tensors_are_all_named_at_once(folder: Path) -> None:
    def drop_norms(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("norm.weight")]:
            del tensors[name]

    edit_tensors(folder, drop_norms)
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors .*model\.norm\.weight"):
        amxq.load_model(folder, target="auto")


def test_unexpected_tensors_are_reported_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_tensors(folder, lambda t: t.update({"extra.a": torch.ones(2), "extra.b": torch.ones(2)}))
    with caplog.at_level(logging.WARNING):
        amxq.load_model(folder, target="auto")
    said = [r.getMessage() for r in caplog.records if "no place" in r.getMessage()]
    assert len(said) == 1 and "extra.a, extra.b" in said[0] and "did you mean" not in said[0]
    caplog.clear()
    edit_tensors(folder, lambda t: t.update({"a_model.norm.weight": torch.ones(2)}))
    with caplog.at_level(logging.WARNING):
        amxq.load_model(folder, target="auto")
    assert "; did you mean 'model.norm.weight'" in caplog.text


def test_progress_is_shown_on_a_terminal_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    amxq.load_model(folder, target="auto")
    assert "loading" not in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    amxq.load_model(folder, target="auto")
    assert "loading: 0 layers" in terminal.getvalue()


def test_config_of_another_size(folder: Path) -> None:
    edit_config(folder, intermediate_size=64)
    with pytest.raises(CheckpointError, match="from config.json; the two do not belong together"):
        amxq.load_model(folder, target="auto")


def test_embedding_of_another_size(folder: Path) -> None:
    edit_config(folder, vocab_size=500)
    with pytest.raises(CheckpointError, match=r"expected \[500, "):
        amxq.load_model(folder, target="auto")


def test_fewer_layers_than_the_file(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"has no layer of that name"):
        amxq.load_model(folder, target="auto")


def test_model_type_that_transformers_does_not_know(folder: Path) -> None:
    edit_config(folder, model_type="no-such-model")
    with pytest.raises(CheckpointError, match="cannot build a language model"):
        amxq.load_model(folder, target="auto")


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"architectures": ["os"], "model_type": 3},
        {"architectures": 7},
        {"rope_parameters": {"rope_type": "none such"}},
    ],
)
def test_config_with_wrong_values(folder: Path, values: dict[str, object]) -> None:
    edit_config(folder, **values)
    with pytest.raises(CheckpointError, match="cannot build a language model"):
        amxq.load_model(folder, target="auto")


def test_code_of_the_checkpoint_is_not_run(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("raise SystemExit('must not run')\n")
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit_config(folder, model_type="own", auto_map=names)
    with pytest.raises(CheckpointError):
        amxq.load_model(folder, target="auto")


def test_without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        amxq.load_model(folder, target="auto")


def test_other_bits_are_refused_with_the_layer(fixture: Callable[[str], Path]) -> None:
    message = r"layer 'model\.layers\.0\.mlp\.down_proj': .* got 8-bit"
    with pytest.raises(QuantizationConfigError, match=message):
        amxq.load_model(fixture("mix8_16-ar-g32-sym"), target="auto")
