"""Greedy generation: the tokens of transformers' own loop, text as it comes, ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic import write_checkpoint

import amxq
from amxq.errors import ArgumentError
from amxq.integrations.generation import encode, end_tokens, generate


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    with amxq.target(amxq.available_targets()[0]):
        return amxq.load_model(write_checkpoint(tmp_path_factory.mktemp("model")))


def test_same_tokens_as_transformers(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    made = generate(model, tokenizer, "the cat sat", max_new_tokens=12, keep_logits=True)
    ids = torch.tensor([made.prompt_ids])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert made.token_ids == expected.tolist()
    assert [int(row.argmax()) for row in made.logits] == made.token_ids
    assert made.prompt_rate > 0 and made.decode_rate > 0


def test_ends_at_an_end_token(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    free = generate(model, tokenizer, "the cat sat", max_new_tokens=5)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [free.token_ids[0]])
    assert free.token_ids[0] in end_tokens(model, tokenizer)
    made = generate(model, tokenizer, "the cat sat", max_new_tokens=5)
    assert made.token_ids == free.token_ids[:1]
    assert made.decode_rate == 0 and made.text == ""


@pytest.mark.parametrize("tokens", [0, -1])
def test_number_of_tokens_is_checked(loaded: tuple[Any, Any], tokens: int) -> None:
    with pytest.raises(ArgumentError, match=f"max_new_tokens is {tokens}; expected 1 or more"):
        generate(*loaded, "the", max_new_tokens=tokens)


def test_empty_prompt(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # A chat template makes tokens of nothing, too.
    chat = AutoTokenizer.from_pretrained(write_checkpoint(tmp_path, chat=True))
    with pytest.raises(ArgumentError, match="the prompt is empty"):
        generate(loaded[0], chat, "")
    with pytest.raises(ArgumentError, match="prompt '  ' has no tokens"):
        generate(*loaded, "  ")


def test_chat_template_is_used(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_checkpoint(tmp_path, chat=True))
    plain = encode(loaded[1], "sky is blue")
    assert encode(tokenizer, "sky is blue") == [11, *plain, 3]


class Bytes:
    """A tokenizer with a token for each byte, so that characters come in pieces."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_comes_in_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    from amxq.integrations import generation

    text = "é ü\n\n日本\n語 end"
    rows = iter(torch.eye(256)[list(text.encode())])  # what a model that says `text` returns
    monkeypatch.setattr(generation, "_rows", lambda model, made, count: rows)
    model = SimpleNamespace(generation_config=None, config=None)
    pieces: list[str] = []
    made = generate(model, Bytes(), "x", on_text=pieces.append)
    assert made.text == "".join(pieces) == text
    assert pieces == list(text)
