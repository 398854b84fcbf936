"""docs/language.md says what the docstrings of the language say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import amxq.language as tl
from amxq.frontend.builtins import HANDLERS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run docs/make_reference.py"


def test_every_function_of_the_language_is_implemented() -> None:
    functions = {f for f in vars(tl).values() if hasattr(f, "__wrapped__")}
    assert functions - {tl.range, tl.static_range} == set(HANDLERS)
