"""What a block was built with is fixed; other changes apply to every later call. Plans and cached tables are right."""

import copy
import random
import warnings

import pytest
import torch
from impls import CASES, POSITIONS, make_position
from torch import nn

import vision_attn as va
from vision_attn.attention.fixed_options import FixedOptions

#: Options that may change after the block was built, and other values.
LIVE = {"scale": 0.3, "causal": True, "impl": "einx"}


def seeded(build):
    torch.manual_seed(0)
    return build()


BLOCKS = {
    "attention": lambda: va.Attention2d(16, 2, position=va.RelPosTable((5, 7)), qk_norm=True, proj_drop=0.1),
    "rotary": lambda: va.AttentionBlock2d(16, 2, position=va.Rope(), kv_stride=2, gate_init=1.0),
    "window": lambda: va.Attention2d(16, 2, pattern=va.Window(3, shift=1), position=va.RelPosDecomposed()),
    "linear": lambda: va.blocks.LinearAttention2d(16, 2),
    "transformer": lambda: va.blocks.TransformerBlock2d(16, 2),
}


def attributes(block):
    """Yield the modules inside a block, and the names of their plain public attributes."""
    for path, module in block.named_modules():
        if isinstance(module, FixedOptions):  # not the layers of torch
            yield from ((path, name) for name in vars(module) if not name.startswith("_") and name != "training")


def other_value(old):
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return 2 * old
    return {"softmax": "elu", "gelu": "relu", "auto": "bmm", "full": "rows"}.get(old, object())


@pytest.mark.parametrize("name", BLOCKS)
def test_every_attribute_raises_or_has_the_effect_that_it_has_on_a_new_block(name):
    x, changed = torch.randn(2, 16, 5, 7), 0
    for path, attribute in attributes(seeded(BLOCKS[name])):
        used, new = seeded(BLOCKS[name]).eval(), seeded(BLOCKS[name]).eval()
        used(x)
        outcomes = []
        for block in (used, new):
            module = block.get_submodule(path)
            try:
                setattr(module, attribute, LIVE.get(attribute, other_value(getattr(module, attribute))))
                outcomes.append(block(x))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                outcomes.append("refused" if "cannot change after it was built" in str(error) else type(error))
        if isinstance(outcomes[0], torch.Tensor):
            torch.testing.assert_close(*outcomes)
        else:
            assert outcomes[0] == outcomes[1], (path, attribute)
        changed += outcomes[0] == "refused" if isinstance(outcomes[0], str) else 0
    assert changed >= 2


WITHOUT_EFFECT = [
    (va.Attention2d, ["qkv_bias", "output_gate"], "of Attention2d cannot change after it was built"),
    (va.AttentionBlock2d, ["kv_stride", "qk_norm"], r"an option of its attention layer\. Build another block"),
    (va.blocks.TransformerBlock2d, ["causal", "scale", "impl"], r"attention layer\. Assign to the attribute of \.attn"),
]


@pytest.mark.parametrize(("block", "names", "message"), WITHOUT_EFFECT)
def test_an_assignment_without_effect_is_an_error(block, names, message):
    for name in names:
        with pytest.raises(AttributeError, match=f"^{name} .*{message}"):
            setattr(block(16, 2), name, 2)
    for scale in (torch.tensor(0.5), nn.Parameter(torch.ones(1))):
        with pytest.raises(AttributeError, match=r"^scale of Attention2d must not be a tensor"):
            va.Attention2d(16, 2).scale = scale


CHANGED = [(va.Rope(), va.Rope(temperature=100.0)), (va.SinCos(), None), (None, va.Rope()), (va.Rope(), va.AbsPos(4))]


@pytest.mark.parametrize(("old", "new"), CHANGED, ids=str)
def test_another_position_encoding_is_refused(old, new):
    block, other = (va.Attention2d(16, 2, position=position) for position in (old, new))
    with pytest.raises(AttributeError, match="position of Attention2d cannot change"):
        block.position = other.position
    if old is not None:
        block.position = copy.deepcopy(block.position)  # as libraries that wrap modules do
        with pytest.raises(AttributeError, match="config of"):
            block.position.config = va.Rope(temperature=10.0)


def random_block(rng):
    name = rng.choice(["full", "rows", "window", "shifted window", "halo", "neighborhood"])
    pattern, position = CASES[name].pattern, rng.choice(POSITIONS)
    options = {"pattern": pattern, "position": make_position(position, pattern, (5, 7))}
    if rng.random() < 0.3:
        options["qk_norm"] = rng.choice([True, "cosine", "match"])
    elif rng.random() < 0.3:
        options["num_kv_heads"] = 1
    return va.Attention2d(16, 2, output_gate=rng.random() < 0.2, attn_drop=rng.choice([0.0, 0.2]), **options)


def random_change(rng, block):
    """Change what may change."""
    change = rng.randrange(7)
    if change == 0:
        va.set_impl_(block, rng.choice(["auto", "sdpa", "bmm", "einx", "einsum"]))
    elif change == 1:
        block.scale = rng.choice([0.1, 1.0])
    elif change == 2 and block.qk_norm != "match" and not isinstance(block.resolved_pattern, va.Neighborhood):
        block.causal = not block.causal
    elif change == 3:
        block.train(rng.random() < 0.5)
    elif change == 4:
        block.attn_drop.p = rng.choice([0.0, 0.4])
    elif change == 5:
        block.proj_drop.train(rng.random() < 0.5).p = rng.choice([0.0, 0.4])
    elif change == 6:
        block.to(rng.choice([torch.float32, torch.float64]))


def random_call(rng, block):
    """Return a function that calls a block in a random mode, with gradients of the parameters where there are any."""
    shape = rng.randint(1, 3), 16, *rng.choice([(5, 7), (6, 4), (1, 3)])
    dtype, seed = block.proj.weight.dtype, rng.randrange(1000)
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    if rng.random() < 0.3:
        x = x.to(memory_format=torch.channels_last)
    tokens = shape[2] * shape[3]
    mask = rng.choice([None, None, torch.rand(tokens, tokens) < 0.8, torch.randn(1, 2, tokens, tokens, dtype=dtype)])
    mode = rng.choice(["grad", "no_grad", "inference", "autocast", "vmap", "jvp", "subclass"])

    def call(block):
        torch.manual_seed(seed)
        if mode == "grad":
            y = block(x, mask)
            return [y, *(g for g in torch.autograd.grad(y.square().sum(), [*block.parameters()], allow_unused=True))]
        if mode in ("no_grad", "inference"):
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                return [block(x, mask)]
        if mode == "autocast":
            with torch.autocast("cpu"):
                return [block(x.float(), mask if mask is None or mask.dtype == torch.bool else mask.float())]
        if mode == "vmap":
            return [torch.vmap(block, randomness="different")(x[None], None if mask is None else mask[None])]
        if mode == "jvp":
            with torch.no_grad():
                return [*torch.func.jvp(lambda z: block(z, mask), (x,), (torch.ones_like(x),))]
        return [block(x.as_subclass(Picture), mask).as_subclass(torch.Tensor)]

    return mode, call


class Picture(torch.Tensor):
    """Data in a subclass of tensors, as in MONAI and fastai."""


def outcome(call, block):
    try:
        return call(block)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))])
def test_random_calls_equal_those_of_a_new_block(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    block, refused = random_block(rng), 0
    for _ in range(12):
        random_change(rng, block)
        mode, call = random_call(rng, block)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap of sdpa
            found, expected = outcome(call, block), outcome(call, copy.deepcopy(block))
        if isinstance(expected, tuple):
            assert found == expected
            refused += 1
            continue
        torch.testing.assert_close(found, expected, msg=lambda text, mode=mode: f"{mode}, {block}: {text}")
    assert refused < 9
