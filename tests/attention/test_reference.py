"""The blocks compared with a definition in NumPy, forward and backward; one implementation is the kernel of torch."""

import itertools

import impls
import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st
from impls import CPU_IMPLS, Case, same, uncompile_flex
from small_networks import captured
from torch.nn import functional as F

import vision_attn as va
from vision_attn.attention import dispatch

IMPLS = (*CPU_IMPLS, "flex")
PADDED = va.Pattern("b n d (h p) w -> b n (h p w) d", p=2)  # one group with all positions and a row of padding
SIZED = va.Pattern("b n d (y p) (r q) -> (b y) n (p r q) d", p=4, q=3, r=4)
CASES = {
    **impls.CASES,
    "padded": Case(PADDED, lambda h, w: (reference.window(h, h + h % 2), reference.full(w)), (True, True)),
    "all sizes": Case(SIZED, same(reference.window, [4], [12])),
}


@pytest.fixture(scope="module", autouse=True)
def uncompiled_flex():
    with pytest.MonkeyPatch.context() as patch:
        uncompile_flex(patch)
        yield


# --- random cases -----------------------------------------------------------------------------------------------------


POSITIONS = {
    None: lambda feat_size: None,
    "decomposed": va.RelPosDecomposed,
    "table": va.RelPosTable,
    "rotary": lambda feat_size: va.Rope(temperature=100.0, feat_size=feat_size),
    "sines": lambda feat_size: va.SinCos(temperature=100.0),
    "convolution": lambda feat_size: va.ConditionalPos(3),
}
MASKS = ("none", "bool", "additive", "fully masked rows", "causal")
CHOICES = {"pattern": sorted(CASES), "mask": MASKS, "heads": [(1, 1), (2, 1), (2, 2), (4, 2)]}
CHOICES["batch"] = [None, 1, 2]  # None: an unbatched feature map
SIZES = {"size": st.tuples(st.integers(1, 8), st.integers(1, 8)), "seed": st.integers(0, 2**16)}
DRAWN_CASES = st.fixed_dictionaries({name: st.sampled_from(of) for name, of in CHOICES.items()} | SIZES)
FLAGS = ("qk_norm", "output_gate", "qkv_bias", "proj_bias")
OPTIONS = st.fixed_dictionaries({**dict.fromkeys(FLAGS, st.booleans()), "scale": st.sampled_from([None, 0.0, -0.7])})


def make(case, position, channels=8, **options):
    """Return a block with random parameters, including norms and tables, and the arguments of the definition."""
    torch.manual_seed(case["seed"])
    pattern, size = CASES[case["pattern"]], case["size"]
    # The tables are created for another size than the feature map, so that they are resized.
    asked = tuple(length % 4 + 1 for length in size) if any(pattern.grows) else None
    table = asked and tuple(n if grows else 1 for n, grows in zip(asked, pattern.grows, strict=True))
    num_heads, num_kv_heads = case["heads"]
    # A neighborhood has a separate argument causal.
    causal = case["mask"] == "causal" and not isinstance(pattern.pattern, va.Neighborhood)
    options = {"num_kv_heads": num_kv_heads, "causal": causal, "dtype": torch.float64, **options}
    block = va.Attention2d(channels, num_heads, pattern=pattern.pattern, position=POSITIONS[position](asked), **options)
    for parameter in block.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    known = {name: getattr(block, name) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "scale")}
    known |= {"causal": causal, "pattern": pattern.relations(*size), "mask": make_mask(case), "temperature": 100.0}
    return block, {**known, "position": position, "feat_size": {"table": table, "rotary": asked}.get(position)}


def make_mask(case):
    generator = np.random.default_rng(case["seed"])
    batch, heads, tokens = case["batch"] or 1, case["heads"][0], case["size"][0] * case["size"][1]
    if case["mask"] == "additive":
        return generator.normal(size=(1, heads, tokens, tokens))
    allowed = generator.random((batch, 1, tokens, tokens)) < 0.6
    if case["mask"] == "fully masked rows":
        allowed[:, :, ::2] = False
    return None if case["mask"] in ("none", "causal") else allowed


def make_map(case, channels, dtype=torch.float64, channels_last=False):
    x = torch.randn(*([] if case["batch"] is None else [case["batch"]]), channels, *case["size"], dtype=dtype)
    return x.movedim(-3, -1).contiguous().movedim(-1, -3) if channels_last else x


def define(x, block, known, state=None):
    """Return the output of the definition for batched or unbatched arrays."""
    state = get_arrays(block) if state is None else state
    y = reference.attention_output(x if x.ndim == 4 else x[None], state, **known)
    return y if x.ndim == 4 else y[0]


def get_arrays(block):
    return {key: value.numpy() for key, value in block.state_dict().items()}


# --- attention, its weights and linear attention ----------------------------------------------------------------------


WIDTHS = ((4, 4), (8, 3), (4, 6))
#: Settings of ``dispatch`` for each way to add a decomposed bias.
FORMS = {
    "one mask": {},
    "chunks": {"CHUNK_LOGITS": 1, "MIN_CHUNK_QUERIES": 2},
    "recomputed chunks": {"CHUNK_LOGITS": 1, "MIN_CHUNK_QUERIES": 3, "RECOMPUTE_ABOVE": 0},
    "folded": {"CHUNKED_DEVICES": ()},
}
DTYPES = (torch.float64, torch.float32)


def check_attention(case, impl, position, widths, options, dtype, channels_last, form):
    """Compare a block with the definition, forward and, in float64, backward."""
    options = {**options, "key_dim": widths[0], "value_dim": widths[1], "out_channels": 5}
    block, known = make(case, position, impl=impl, dtype=dtype, **options)
    x, state = make_map(case, 8, dtype, channels_last), get_arrays(block)
    mask = None if known["mask"] is None else torch.from_numpy(known["mask"])
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    expected = define(x.numpy(), block, known)
    tolerance = (1e-11 if dtype == torch.float64 else 2e-5) * max(1.0, abs(expected).max())
    generator = np.random.default_rng(case["seed"])
    cotangent = generator.normal(size=expected.shape)
    named = {"x": x.clone().requires_grad_(), **dict(block.named_parameters())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FORMS[form].items():
            patch.setattr(dispatch, name, value)
        found = block(named["x"], mask)
        objective = (found * torch.from_numpy(cotangent)).sum()
        gradients = torch.autograd.grad(objective, list(named.values()), allow_unused=True)
    assert found.dtype == dtype
    if x.dim() == 4:
        assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=0, atol=tolerance)
    if dtype != torch.float64:
        return

    # The gradient in a random direction of input and parameters must equal finite differences of the definition.
    step = {key: generator.normal(size=value.shape) for key, value in {"x": x.numpy(), **state}.items()}

    def define_at(by):
        moved = {key: value + by * step[key] for key, value in state.items()}
        return float((define(x.numpy() + by * step["x"], block, known, moved) * cotangent).sum())

    pairs = zip(named, gradients, strict=True)
    slope = sum(float((gradient.numpy() * step[key]).sum()) for key, gradient in pairs if gradient is not None)
    assert slope == pytest.approx((define_at(1e-6) - define_at(-1e-6)) / 2e-6, rel=1e-5, abs=1e-5)


#: Patterns that differ from another one only in their sizes or axes; random cases contain them as well.
SIMILAR = ("columns", "window", "grid", "even, dilated", "stripes")


@pytest.mark.parametrize("pattern", [pytest.param(x, marks=[pytest.mark.slow] * (x in SIMILAR)) for x in CASES])
def test_every_pair_of_pattern_position_and_implementation_equals_the_definition(pattern):
    for number, position in enumerate(POSITIONS):
        turn = list(CASES).index(pattern) + number  # combines implementations with patterns, positions and masks
        case = {"pattern": pattern, "mask": MASKS[(turn + number) % len(MASKS)], "seed": turn}
        # There are two shapes, because einx compiles each shape.
        case |= {"size": (3, 4), "batch": (2, None)[turn % 2], "heads": ((2, 1), (4, 2))[turn % 2]}
        options = {name: bool(turn >> bit & 1) for bit, name in enumerate(FLAGS)}
        impl, widths = IMPLS[turn % len(IMPLS)], WIDTHS[turn % len(WIDTHS)]
        for form in FORMS if position == "decomposed" else ("one mask",):
            check_attention(case, impl, position, widths, {**options, "scale": None}, DTYPES[0], bool(turn % 3), form)
        check_weights(case, impl, position, options["qk_norm"])


def check_weights(case, impl, position, qk_norm):
    """Compare returned and captured attention weights of a block with the definition."""
    # If the values are one-hot vectors of positions and the projection is an identity, the output is the weights.
    case = {**case, "batch": case["batch"] or 1}
    height, width = case["size"]
    tokens, (heads, kv_heads) = height * width, case["heads"]
    channels = 8 + tokens + -tokens % 4  # SinCos requires a multiple of 4
    widths = {"channels": channels, "key_dim": 4, "value_dim": tokens, "out_channels": heads * tokens}
    block, known = make(case, position, impl=impl, qkv_bias=False, proj_bias=False, qk_norm=qk_norm, **widths)
    x = torch.zeros(case["batch"], channels, height, width, dtype=torch.float64)
    x[:, :8], x[:, 8 : 8 + tokens] = make_map(case, 8), torch.eye(tokens).view(tokens, height, width)
    with torch.no_grad():
        values = block.qkv.weight[-kv_heads * tokens :, :, 0, 0]
        values.zero_()
        values[:, 8 : 8 + tokens] = torch.eye(tokens, dtype=torch.float64).repeat(kv_heads, 1)
        block.proj.weight.copy_(torch.eye(heads * tokens)[:, :, None, None])
        if position == "convolution":
            block.position.conv.weight[8:], block.position.conv.bias[8:] = 0, 0
        if position == "sines":  # the block adds them again
            positions = np.indices(case["size"]).reshape(2, -1)
            x[:, 8:] -= torch.from_numpy(reference.sin_cos(channels, positions, 100.0)[8:]).view(-1, height, width)
    expected = define(x.numpy(), block, known).reshape(case["batch"], heads, tokens, tokens).swapaxes(2, 3)
    mask = None if known["mask"] is None else torch.from_numpy(known["mask"])
    corners = [(height - 1, width - 1), (0, 0)]  # the image has the size of the feature map
    found = captured(block, x, mask)[""].weights.flatten(3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)
    selected = captured(block, x, mask, queries=corners, heads=heads - 1)[""].weights.flatten(3)
    np.testing.assert_allclose(selected, expected[:, [-1]][:, :, [-1, 0]], rtol=0, atol=1e-11)
    if case["pattern"] != "halo":  # with a halo, queries also attend to zeros outside the feature map
        # The sums are 1, or 0 for fully masked queries.
        np.testing.assert_allclose(found.sum(3), expected.sum(3).round(), rtol=0, atol=1e-10)
    last_and_first = torch.tensor([tokens - 1, 0])
    torch.testing.assert_close(block.attention_weights(x, mask, last_and_first), found[:, :, last_and_first])


def check_linear_attention(case, impl, feature_map, dtype):
    """Compare linear attention with a torch version that computes all weights, forward and backward."""
    torch.manual_seed(case["seed"])
    n, tokens = case["heads"][0], case["size"][0] * case["size"][1]
    block = va.blocks.LinearAttention2d(8, n, impl=impl, feature_map=feature_map, dtype=dtype)
    mask = torch.rand(case["batch"] or 1, n, 1, tokens) < 0.6 if case["mask"] in ("bool", "fully masked rows") else None
    x = make_map(case, 8, dtype).requires_grad_()
    found, exact = block(x, mask), {key: value.double() for key, value in block.state_dict().items()}
    maps = x.double().reshape(-1, *x.shape[-3:])
    qkv = F.conv2d(maps, exact["qkv.weight"], exact["qkv.bias"])
    q, k, v = qkv.unflatten(1, (3, n, -1)).flatten(4).unbind(1)  # (b, n, d, tokens)
    allowed = torch.tensor(True) if mask is None else mask
    if feature_map == "softmax":
        weights = k.masked_fill(~allowed, -1e9).softmax(3).masked_fill(~allowed, 0.0).mT @ q.softmax(2)
    else:
        features = {"elu": lambda y: F.elu(y) + 1, "relu": F.relu, "none": lambda y: y}[feature_map]
        q, k = features(q), features(k)
        weights = (k * allowed).mT @ q
    if feature_map in ("elu", "relu"):
        total = weights.sum(2, keepdim=True)
        weights = weights / (total + 1e-5 if feature_map == "relu" else total.clamp(min=1e-30))
    expected = F.conv2d((v @ weights).reshape(maps.shape), exact["proj.weight"], exact["proj.bias"]).reshape(x.shape)
    both = [(y.detach(), *torch.autograd.grad(y.double().sin().sum(), x, retain_graph=True)) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        tolerance = (1e-11 if dtype == torch.float64 else 2e-5) * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance)


# --- random tests -----------------------------------------------------------------------------------------------------

DRAWN = {"case": DRAWN_CASES, "impl": st.sampled_from(IMPLS), "position": st.sampled_from(list(POSITIONS))}
SAMPLED = {name: st.sampled_from(of) for name, of in {"widths": WIDTHS, "dtype": DTYPES, "form": list(FORMS)}.items()}
attention_drawn = given(**DRAWN, **SAMPLED, options=OPTIONS, channels_last=st.booleans())
weights_drawn = given(**DRAWN, qk_norm=st.booleans())
LINEAR = {"impl": ("einx", "bmm"), "feature_map": ("softmax", "elu", "relu", "none"), "dtype": DTYPES}
linear_drawn = given(case=DRAWN_CASES, **{name: st.sampled_from(values) for name, values in LINEAR.items()})
few, many = settings(max_examples=8), settings.get_profile("random")

test_attention_equals_the_definition_forward_and_backward = few(attention_drawn(check_attention))
test_weights_equal_the_definition = few(weights_drawn(check_weights))


@pytest.mark.parametrize("feature_map", LINEAR["feature_map"])
def test_linear_attention_equals_its_definition(feature_map):
    inputs = ("none", (5, 4)), ("bool", (5, 4)), ("bool", (1, 1))
    for number, (impl, (mask, size)) in enumerate(itertools.product(LINEAR["impl"], inputs)):
        case = {"mask": mask, "size": size, "batch": (2, None)[number % 2], "heads": (2, 1), "seed": number}
        check_linear_attention(case, impl, feature_map, DTYPES[number // 2 % 2])


@pytest.mark.thorough
def test_blocks_equal_the_definition_in_many_random_cases():
    many(attention_drawn(check_attention))()
    many(weights_drawn(check_weights))()
    many(linear_drawn(check_linear_attention))()
