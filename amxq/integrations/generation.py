"""Greedy text generation with a transformers model, token by token, and how fast it went."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from amxq.errors import ArgumentError

# What tokenizers put for bytes that are no whole character yet.
_INCOMPLETE = "\ufffd"


@dataclass
class Generation:
    """What :func:`generate` made.

    Attributes:
        prompt_ids, token_ids: the tokens of the prompt, and the new ones.
        text: the new tokens as text.
        prompt_seconds: time until the first new token was known.
        decode_seconds: time of all later ones together.
        logits: for every new token the fp32 row [V] that it was chosen from; empty unless kept.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return len(self.prompt_ids) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second after the first; 0 if there was no second one."""
        count = len(self.token_ids) - 1
        return count / self.decode_seconds if count > 0 and self.decode_seconds else 0.0


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of `prompt`: as a user's message if the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    on_text: Callable[[str], None] | None = None,
    keep_logits: bool = False,
) -> Generation:
    """Continue `prompt` with the most likely token each time.

    Args:
        model, tokenizer: as :func:`amxq.load_model` returns them.
        prompt: text, not empty; put into the tokenizer's chat template if it has one.
        max_new_tokens: 1 or more; generation also ends at the model's end-of-text tokens.
        on_text: called with each piece of text as soon as it is known.
        keep_logits: keep the logits that each token was chosen from.

    Raises:
        ArgumentError: `max_new_tokens` is less than 1, or the prompt has no text or no tokens.
    """
    if max_new_tokens < 1:
        raise ArgumentError(f"max_new_tokens is {max_new_tokens}; expected 1 or more")
    if not prompt:
        raise ArgumentError("the prompt is empty; expected some text")
    made = Generation(encode(tokenizer, prompt))
    if not made.prompt_ids:
        raise ArgumentError(f"the prompt {prompt!r} has no tokens; expected some text")
    ends = end_tokens(model, tokenizer)
    stream = _TextStream(tokenizer, on_text)
    begin = time.perf_counter()
    for row in _rows(model, made, max_new_tokens):
        token = int(row.float().numpy().argmax())  # torch's takes 0.7 ms for 150,000 bf16
        now = time.perf_counter()
        if made.token_ids:
            made.decode_seconds += now - begin
        else:
            made.prompt_seconds = now - begin
        made.token_ids.append(token)
        if keep_logits:
            made.logits.append(row.float().clone())
        if token in ends:
            break
        stream.add(token)
        begin = time.perf_counter()  # the time of printing is not the model's
    made.text = stream.finish()
    return made


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text, from the generation settings, the model and the tokenizer."""
    found: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return found


def _rows(model: Any, made: Generation, count: int) -> Iterator[torch.Tensor]:
    """The logits [V] after the prompt and after each token that the caller has added since."""
    accepted = inspect.signature(model.forward).parameters
    # transformers has renamed the argument, and the field of the result with it.
    name = "cache" if "cache" in accepted else "past_key_values"
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1  # a row [V] for each token of a prompt would be large
    ids = made.prompt_ids
    for _ in range(count):
        result = _step(model, ids, options)
        options[name] = result[name]
        yield result.logits[0, -1]
        ids = made.token_ids[-1:]


@torch.inference_mode()
def _step(model: Any, ids: list[int], options: dict[str, Any]) -> Any:
    return model(input_ids=torch.tensor([ids], device="cpu"), **options)


class _TextStream:
    """Tokens in, text out: a piece is passed on once no later token can change it."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._tokens: list[int] = []  # of the unfinished line, and one token of what is before
        self._shown = 0  # characters of their text that have been passed on
        self._pieces: list[str] = []

    def add(self, token: int) -> None:
        self._tokens.append(token)
        text = self._decode()
        if text.endswith(_INCOMPLETE):
            return
        self._pass_on(text)
        if text.endswith("\n"):
            # Decoding restarts here, or long texts would cost the square of their length. The
            # last token stays as context: some tokenizers drop the first one's leading space.
            self._tokens = self._tokens[-1:]
            self._shown = len(self._decode())

    def finish(self) -> str:
        self._pass_on(self._decode())
        return "".join(self._pieces)

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _pass_on(self, text: str) -> None:
        piece = text[self._shown :]
        if not piece:
            return
        self._shown = len(text)
        self._pieces.append(piece)
        if self._on_text is not None:
            self._on_text(piece)
