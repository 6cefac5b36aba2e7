"""The definition itself, against torch."""

import numpy as np
import torch
from torch.nn import functional as F

from vision_attn import reference


def test_softmax_is_torchs():
    logits = np.random.default_rng(0).normal(size=(3, 5)) * 100
    np.testing.assert_allclose(reference.softmax(logits), torch.from_numpy(logits).softmax(-1).numpy(), atol=1e-15)


def test_a_row_of_nothing_is_zeros():
    logits = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    np.testing.assert_array_equal(reference.softmax(logits), [[0.0, 0.0], [1.0, 0.0]])


def test_attention_is_torchs():
    generator = np.random.default_rng(0)
    q, k, v = generator.normal(size=(5, 4)), generator.normal(size=(7, 4)), generator.normal(size=(7, 3))
    for mask in (None, generator.random((5, 7)) < 0.7, generator.normal(size=(5, 7))):
        expected = F.scaled_dot_product_attention(
            *(torch.from_numpy(x) for x in (q, k, v)),
            attn_mask=None if mask is None else torch.from_numpy(mask),
            scale=0.3,
        )
        np.testing.assert_allclose(reference.attention(q, k, v, 0.3, mask), expected.numpy(), atol=1e-14)


def test_conv1x1_is_torchs():
    generator = np.random.default_rng(0)
    x, weight, bias = generator.normal(size=(3, 4, 5)), generator.normal(size=(6, 3, 1, 1)), generator.normal(size=6)
    expected = F.conv2d(torch.from_numpy(x)[None], torch.from_numpy(weight), torch.from_numpy(bias))[0]
    np.testing.assert_allclose(reference.conv1x1(x, weight, bias), expected.numpy(), atol=1e-14)
