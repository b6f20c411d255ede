"""Regular expressions of adapters: matched as `re` matches them, or refused where that takes seconds."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgg.hf import patterns
from jgg.hf.patterns import check_pattern, matches, matches_end

NAMES = ("", "a", "ab", "aab", "model.layers.0.self_attn.q_proj", "model.layers.12.mlp.experts.gate_up_proj", "b.a_b-1")
PATTERNS = (
    "",
    "a*b",
    "(a|b)*",
    "a{2}b",
    "a{,1}b?",
    "a{1,}b",
    "(?:a|ab)(?P<last>b?)",
    "a??b+?",
    "[^b]*b",
    r"[]a\]]+b",
    "{a}|a{b}?",
    r".*\.(q|k)_proj",
    r"^(?!.*mlp).*_proj$",
    r"(?=.*attn)[\w.]+",
    r"\Amodel\.\D+\d+.*\Z",
    r".*layers\.\d{1,2}\..*\b\w+_proj\b",
    r".*\.[0-9]+\.mlp\..*",
    r"((a*)*b)*",
    r"(a)\1",
    "(?<=a)b",
    "(?P<a>a)(?P=a)",
    "a(?#b)",
    r"b\.a_b\-1",
    r"\S+\Bq_proj",
    r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|gate_up_proj).*?)",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_re_matches_them(pattern):
    check_pattern(pattern)
    for name in NAMES:
        assert matches(pattern, name) == bool(re.fullmatch(pattern, name)), name
        assert matches_end(pattern, name) == bool(re.match(rf"(.*\.)?({pattern})$", name)), name


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\b", "$", "^", "(?=a)", "(?!b)", "(?!ab|b)"])
TREES = st.recursive(
    ATOMS,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3).map("".join),
        st.lists(parts, min_size=1, max_size=3).map(lambda own: f"({'|'.join(own)})"),
        st.tuples(parts, st.sampled_from(["*", "+?", "?", "{2}", "{1,2}", "{0,1}?"])).map("(?:{0[0]}){0[1]}".format),
    ),
    max_leaves=6,
)


@given(TREES, st.text("ab.", max_size=6))
def test_random_patterns_match_as_re_matches_them(pattern, text):
    assert matches(pattern, text) == bool(re.fullmatch(pattern, text))


ENDLESS = ("(a+)+b", "(a|a)*b", "(.*)*(.*)*(.*)*b", "(a{0,9999}){9999}b")


@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_with_which_re_never_ends_are_matched(pattern):
    assert not matches(pattern, "a" * 100)
    assert not matches_end(pattern, "a" * 100)
    assert matches(pattern, "a" * 100 + "b")


def test_a_pattern_that_takes_seconds_is_refused(monkeypatch):
    monkeypatch.setattr(patterns, "_SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"takes more than .* to match 'aaa"):
        matches("(a|aa)+" + "(a?)" * 30 + "b", "a" * 100)


@pytest.mark.parametrize("pattern", ["(", "a**", "[", "(" * 5000 + ")" * 5000], ids=range(4))
def test_what_re_refuses_is_refused(pattern):
    with pytest.raises(ValueError):
        check_pattern(pattern)
