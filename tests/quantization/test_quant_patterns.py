"""Patterns of configurations: Python's answers, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amxq.errors import QuantizationConfigError
from amxq.quantization.patterns import MAX_LENGTH, Pattern

ATOMS = ("a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", r"\W", "0", "[a-c0]", "[^.0-9]")
ANCHORS = (r"\b", r"\B", "^", "$", r"\A", r"\Z", "(?<=ab)", "(?<!a)", r"(?<=\d)")
REPEATS = ("*", "+", "?", "*?", "+?", "{2}", "{0,2}", "{1,3}", "{2,}")

patterns = st.recursive(
    st.sampled_from(ATOMS + ANCHORS),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(REPEATS)),
        st.builds("(?={})".format, inner),
        st.builds("(?!{})".format, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(patterns, st.text("ab.0c\n", max_size=9))
def test_answers_are_those_of_re(text: str, name: str) -> None:
    pattern, python = Pattern(text, "x"), re.compile(text)
    if name or r"\B" not in text:  # Python 3.14 changed what \B means in an empty string
        assert pattern.search(name) == bool(python.search(name))
        assert pattern.match(name) == bool(python.match(name))


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$b",
        "(a*)*b",
        "((a|a)*)*c",
        "(a?){60}a{60}b",
        ".*a.*a.*a.*a.*a.*a.*a.*a.*b",
        "((((a*)*)*)*)*b",
        "(?:(?:(?:a*b?)*c?)*d?)*e",
        "((a{0,60}){0,60}){0,60}b",
        "(a{1,1000}){1,1000}b",
        "(?=.*(?=.*(?=.*(?=.*b))))",
        "(" * 90 + "a*" + ")*" * 90 + "b",
        "[" + "".join(map(chr, range(0x100, 0x1100))) + "]*b",
        "(?:a|" * 80 + "b" + ")*" * 80 + "c",
        "a{4000000000}",
    ],
)
def test_hostile_patterns_end_soon(text: str) -> None:
    begin = time.perf_counter()
    try:
        assert not Pattern(text, "x").search("a" * 400)
    except QuantizationConfigError as error:
        assert "steps" in str(error)
    assert time.perf_counter() - begin < 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(a)\\1", "a reference to a group"),
        ("(?i)a", "inline flags"),
        ("(?i:a)", "inline flags"),
        ("a(", "is not a regular expression"),
        ("[z-a]", "is not a regular expression"),
        ("(?<=a*)b", "look-behind"),
        ("(" * 5000, "is not a regular expression"),
        ("a" * (MAX_LENGTH + 1), "at most"),
    ],
)
def test_what_is_refused_is_quoted(text: str, why: str) -> None:
    with pytest.raises(QuantizationConfigError, match=why) as error:
        Pattern(text, "extra_config")
    assert str(error.value).startswith("extra_config has the key")
    assert len(str(error.value)) < 600


def test_patterns_of_real_checkpoints() -> None:
    gate = Pattern(r".*mlp\.gate.*", "x")
    assert gate.search("model.layers.0.mlp.gate_proj") and not gate.search("model.layers.0.mlp.up")
    rest = Pattern(r"^(?!.*\.experts\.).*proj$", "x")
    assert rest.match("model.layers.3.self_attn.q_proj")
    assert not rest.match("model.layers.3.mlp.experts.7.up_proj")
    some = Pattern(r".*\.(?:[1-9]|1[0-9]|2[0-1])\..*", "x")
    assert some.match("model.layers.21.mlp.x") and not some.match("model.layers.0.mlp.x")
