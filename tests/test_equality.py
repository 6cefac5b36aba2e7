"""Every implementation, pattern and position term together, against the definition in NumPy: forward and backward."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vision_attn as va
from vision_attn import reference


@dataclasses.dataclass(frozen=True)
class Case:
    """A pattern as one asks for it, what it means along each axis, and whether its groups grow with the map."""

    pattern: object
    relations: Callable
    grows: tuple[bool, bool] = (False, False)

    def table_size(self, size):
        """The ``feat_size`` that a table needs, here for a map that is not the one it meets: tables are stretched."""
        if not any(self.grows):
            return None, None
        asked = tuple(length % 4 + 1 for length in size)
        return asked, tuple(n if grows else 1 for n, grows in zip(asked, self.grows, strict=True))


PATTERNS = {
    "full": Case("full", lambda h, w: (reference.along(h), reference.along(w)), (True, True)),
    "rows": Case("rows", lambda h, w: (reference.alike(h), reference.along(w)), (False, True)),
    "columns": Case("columns", lambda h, w: (reference.along(h), reference.alike(w)), (True, False)),
    "window": Case(va.Window(3), lambda h, w: (reference.window(h, 3), reference.window(w, 3))),
    "shifted": Case(
        va.Window((4, 3), shift=(2, 1)), lambda h, w: (reference.window(h, 4, 2), reference.window(w, 3, 1))
    ),
    "grid": Case(va.Grid((2, 3)), lambda h, w: (reference.grid(h, 2), reference.grid(w, 3))),
    "neighborhood": Case(va.Neighborhood(3), lambda h, w: (reference.neighborhood(h, 3), reference.neighborhood(w, 3))),
    "even, dilated neighborhood": Case(
        va.Neighborhood((4, 3), dilation=(1, 2)),
        lambda h, w: (reference.neighborhood(h, 4), reference.neighborhood(w, 3, 2)),
    ),
    "stripes": Case(
        va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=2),
        lambda h, w: (reference.along(h), reference.alike(w, every=2)),
        (True, True),
    ),
    "tokens in another order": Case(
        va.Pattern("b n d (h q) w -> (q b w) n h d".replace("(q b w)", "(b w q)"), q=2),
        lambda h, w: (reference.alike(h, every=2), reference.alike(w)),
        (True, False),
    ),
}
POSITIONS = {
    None: lambda feat_size: None,
    "decomposed": va.RelPosDecomposed,
    "table": va.RelPosTable,
    "rotary": lambda feat_size: va.Rope2d(temperature=100.0, feat_size=feat_size),
    "waves": lambda feat_size: va.SinCos(temperature=100.0),
    "convolution": lambda feat_size: va.ConditionalPos(3),
}
MASKS = ("none", "bool", "additive", "fully masked rows", "causal")


def make(name, position, size, *, impl="sdpa", dtype=torch.float64, seed=0, **shape):
    """A block with random parameters, norms and tables among them, and what the definition needs to know of it."""
    torch.manual_seed(seed)
    case = PATTERNS[name]
    asked, table = case.table_size(size)
    if position == "rotary":
        table = asked
    block = va.Attention2d(
        shape.pop("channels"),
        shape.pop("num_heads"),
        impl=impl,
        pattern=case.pattern,
        position=POSITIONS[position](asked),
        dtype=dtype,
        **shape,
    )
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    options = {
        "key_dim": block.key_dim,
        "value_dim": block.value_dim,
        "num_kv_heads": block.num_kv_heads,
        "causal": block.causal,
        "pattern": case.relations(*size),
        "position": position,
        "feat_size": table if position in ("table", "rotary") else None,
        "temperature": 100.0,
    }
    return block, options


def make_mask(kind, batch, heads, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind in ("none", "causal"):
        return None
    if kind == "additive":
        return torch.randn(1, heads, tokens, tokens, generator=generator, dtype=torch.float64)
    allowed = torch.rand(batch, 1, tokens, tokens, generator=generator) < 0.6
    if kind == "fully masked rows":
        allowed[:, :, ::2] = False
    return allowed


def defined(block, x, mask, options, state=None):
    state = {key: value.numpy() for key, value in block.state_dict().items()} if state is None else state
    return reference.attention_map(
        x if isinstance(x, np.ndarray) else x.numpy(),
        state,
        block.num_heads,
        mask=None if mask is None else mask.numpy(),
        scale=block.scale,
        **options,
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_position_and_mask_equals_the_definition(pattern, position, mask):
    # Each of them once at least; what else there is, and how they meet, is drawn below.
    size = (5, 7)
    block, known = make(pattern, position, size, channels=8, num_heads=2, num_kv_heads=1, causal=mask == "causal")
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    mask = make_mask(mask, 2, 2, 35, seed=0)
    expected = defined(block, x, mask, known)
    for impl in ("sdpa", "einx"):
        with va.use_impl(block, impl), torch.no_grad():
            np.testing.assert_allclose(
                block(x, mask).numpy(), expected, rtol=0, atol=1e-12 * max(1, abs(expected).max())
            )


@settings(max_examples=150, deadline=None)
@given(
    impl=st.sampled_from(va.IMPLS),
    pattern=st.sampled_from(sorted(PATTERNS)),
    position=st.sampled_from(list(POSITIONS)),
    mask=st.sampled_from(MASKS),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    widths=st.sampled_from([(4, 4), (8, 3), (4, 6)]),
    options=st.fixed_dictionaries(
        {"qk_norm": st.booleans(), "output_gate": st.booleans(), "qkv_bias": st.booleans(), "proj_bias": st.booleans()}
    ),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    channels_last=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_everything_equals_the_definition_forward_and_backward(
    impl, pattern, position, mask, size, batch, heads, widths, options, dtype, channels_last, seed
):
    num_heads, num_kv_heads = heads
    key_dim, value_dim = widths
    block, known = make(
        pattern,
        position,
        size,
        impl=impl,
        dtype=dtype,
        seed=seed,
        channels=8,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        out_channels=5,
        causal=mask == "causal",
        **options,
    )
    x = torch.randn(batch, 8, *size, dtype=dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    mask = make_mask(mask, batch, num_heads, size[0] * size[1], seed)
    expected = defined(block, x, mask, known)
    tolerance = (1e-11 if dtype == torch.float64 else 2e-5) * max(1.0, abs(expected).max())
    given_mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask

    with torch.no_grad():
        found = block(x, given_mask)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=tolerance)
    if impl == "flex" or dtype != torch.float64:  # flex has no backward pass on the CPU
        return

    # The gradient along one random direction of the input and of all parameters, against finite differences of NumPy.
    generator = np.random.default_rng(seed)
    state = {key: value.numpy() for key, value in block.state_dict().items()}
    cotangent = generator.normal(size=expected.shape)
    step = {key: generator.normal(size=value.shape) for key, value in {"x": x.numpy(), **state}.items()}

    def objective(by):
        moved = {key: value + by * step[key] for key, value in state.items()}
        return float((defined(block, x.numpy() + by * step["x"], mask, known, moved) * cotangent).sum())

    slope = (objective(1e-6) - objective(-1e-6)) / 2e-6
    x = x.detach().requires_grad_()
    y = (block(x, given_mask) * torch.from_numpy(cotangent)).sum()
    named = dict(block.named_parameters())
    gradients = torch.autograd.grad(y, [x, *named.values()], allow_unused=True)
    found_slope = sum(
        float((gradient * torch.from_numpy(step[key])).sum())
        for key, gradient in zip(["x", *named], gradients, strict=True)
        if gradient is not None
    )
    assert found_slope == pytest.approx(slope, rel=1e-5, abs=1e-5)
