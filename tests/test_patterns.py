"""An einx pattern and its raw twin cut the same tokens out of a map and put them back."""

import pytest
import torch

from vision_attn.patterns import PATTERNS, Full, resolve_pattern


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_einx_form_and_its_twin_are_the_same(name, memory_format):
    pattern = PATTERNS[name]
    qkv = torch.randn(2, 3 * 2 * 4, 3, 5).contiguous(memory_format=memory_format)
    for ours, twin in zip(pattern.split_einx(qkv, 2), pattern.split_bmm(qkv, 2), strict=True):
        assert ours.shape == (2, 2, 15, 4)
        assert torch.equal(ours, twin)
    tokens = torch.randn(2, 2, 15, 4)
    assert torch.equal(pattern.merge_einx(tokens, (3, 5)), pattern.merge_bmm(tokens, (3, 5)))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("form", ["einx", "bmm"])
def test_merging_is_the_inverse_of_splitting(name, form):
    pattern = PATTERNS[name]
    qkv = torch.randn(2, 3 * 2 * 4, 3, 5)
    parts = getattr(pattern, f"split_{form}")(qkv, 2)
    back = torch.cat([getattr(pattern, f"merge_{form}")(part, (3, 5)) for part in parts], dim=1)
    assert torch.equal(back, qkv)


def test_tokens_are_row_major():
    qkv = torch.arange(6.0).view(1, 1, 2, 3).expand(1, 3, 2, 3)
    q, _, _ = Full().split_bmm(qkv, 1)
    assert q.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_patterns_compare_equal_and_print_as_code():
    assert Full() == Full()
    assert repr(Full()) == "Full()"


def test_an_unknown_pattern_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="pattern must be one of 'full'; got 'rows'"):
        resolve_pattern("rows")


def test_einx_names_the_size_that_does_not_fit():
    with pytest.raises(Exception, match="n = 5"):
        Full().split_einx(torch.zeros(1, 24, 2, 2), 5)
