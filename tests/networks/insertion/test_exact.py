"""Any block as an identity at initialization: initialization, saving, measuring and removing."""

import copy

import any_block
import pytest
import timm
import torch
from any_block import OwnSE, SimAM
from small_networks import Net
from torch import nn
from torch.nn import functional as F

import vision_attn as va
from vision_attn.networks.insertion.exact import ExactBlock

IMAGES = (1, 3, 14, 14)

pytestmark = pytest.mark.filterwarnings("ignore:attention has little effect")


NETWORKS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "a U-Net")) for name in any_block.NETWORKS]


@pytest.mark.filterwarnings("ignore:the model pads images")
@pytest.mark.parametrize("network", NETWORKS)
def test_every_block_in_every_network_changes_nothing_learns_at_once_and_comes_out(network):
    assert all(any_block.check(block, network) for block in any_block.BLOCKS)


def queries_and_keys(channels):
    """Return a block whose queries and keys would both be zero, so that neither receives a gradient."""

    def run(block, x):
        q, k, v = block.qkv(x).flatten(2).chunk(3, 1)
        return x + (v @ (k.transpose(1, 2) @ q).softmax(1)).reshape(x.shape)

    return Net(run, qkv=nn.Conv2d(channels, 3 * channels, 1))


class Grouped(nn.Conv2d):
    """A block whose ``view`` requires a contiguous feature map."""

    def __init__(self, channels):
        super().__init__(channels // 4, channels // 4, 1)

    def forward(self, x):
        parts = x.view(-1, x.shape[1] // 4, *x.shape[2:])
        return (parts * super().forward(parts).sigmoid()).view(x.shape)


def low_rank(channels):
    """Return a block whose parameters have different numbers of rows."""
    down, up = nn.Parameter(torch.rand(4, channels)), nn.Parameter(torch.rand(channels, 4))
    return Net(lambda block, x: x + torch.einsum("cr,rd,bdhw->bchw", block.up, block.down, x), down=down, up=up)


class InPlace(nn.Conv2d):
    def __init__(self, channels):
        super().__init__(channels, channels, 1)

    def forward(self, x):
        return super().forward(x.relu_())


class HalfBiased(InPlace):
    """A block in which only the weights of half of the rows of the last layer learn."""

    def forward(self, x):
        return x + F.conv2d(x, self.weight, self.bias * (torch.arange(len(self.bias), device=x.device) % 2))


def both(channels, **options):
    """Return two blocks for one site as one module (mmdetection#9786)."""
    return nn.Sequential(*(va.AttentionBlock2d(channels, pattern=name, **options) for name in ("full", "rows")))


class Shifted(va.AttentionBlock2d):
    """A block whose residual branch is not added to its input."""

    def __init__(self, channels):
        super().__init__(channels, 2)
        self.shift = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x, mask=None, context=None):
        return super().forward(x + self.shift, mask, context)


GATE, ALL = "gate set to zero", "parameters of the block set to zero"
#: Block and dtype, and the expected initialization and wrapper options.
TRIED = {
    ("se", "float32"): ("fc2 set to zero, output multiplied by 2", {"scale": 2.0}),
    ("cbam", "float32"): ("channel.fc2 and spatial.conv.bn set to zero, output multiplied by 4", {"scale": 4.0}),
    ("gca", "float32"): ("mlp_add.fc2 set to zero", {}),
    ("nl", "float32"): ("", {}),
    ("bat", "float32"): (GATE, {"gated": True}),
    ("se", "float16"): (GATE, {"gated": True}),  # Halving is not exact for the smallest numbers.
    (OwnSE, "float32"): ("up set to zero, output multiplied by 2", {"scale": 2.0}),
    (Grouped, "float32"): (f"{ALL}, output multiplied by 2", {"scale": 2.0, "copied": True}),
    (SimAM, "float32"): (GATE, {"gated": True}),
    (queries_and_keys, "float32"): (GATE, {"gated": True}),
    (low_rank, "float32"): (GATE, {"gated": True}),  # Two zero factors receive no gradient.
    (HalfBiased, "float32"): (ALL, {}),
    (InPlace, "float32"): (GATE, {"gated": True, "copied": True}),
    (va.Attention2d, "float32"): (GATE, {"gated": True}),
    (va.blocks.TransformerBlock2d, "float32"): ("attn.proj and fc2 set to zero", {}),
    (va.AttentionBlock2d, "float32"): ("", {}),
    (both, "float32"): ("", {}),
    (Shifted, "float32"): (GATE, {"gated": True}),
}


def test_a_block_that_is_no_identity_in_training_mode_is_not_verified_there():
    run = lambda block, x: block.drop(x + block.conv(x))  # noqa: E731
    build = lambda c: Net(run, conv=nn.Conv2d(c, c, 1), drop=nn.Dropout(0.5))  # noqa: E731
    report = va.insert_(network(), build, names="0", example_input=IMAGES)
    assert report.verified.startswith("verified in evaluation mode; not verified in training mode: the output differs")


def test_buffers_of_a_block_are_kept_and_its_output_has_the_dtype_of_the_network():
    def run(block, x):
        block.runs.add_(1 if block.runs < 9 else 0)  # does not run without values
        return (x + block.conv(x)).float()

    def build(channels):
        block = Net(run, conv=nn.Conv2d(channels, channels, 1))
        block.register_buffer("runs", torch.tensor(0))
        return block

    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)).bfloat16(), torch.randn(2, 3, 8, 8).bfloat16()
    before = model(x)
    va.insert_(model, build, names="0", example_input=x)
    assert torch.equal(model(x), before)
    assert int(va.inserted_blocks(model)["0"].block.runs) == 1


def network(dtype=torch.float32, channels=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, channels, 1), nn.Flatten(2), nn.Unflatten(2, IMAGES[2:])).eval().to(dtype)


@pytest.mark.parametrize(("block", "dtype"), TRIED, ids=lambda value: getattr(value, "__name__", value))
def test_the_initialization_of_a_block_is_found_by_testing(block, dtype):
    identity_init, wrapper_options = TRIED[block, dtype]
    model = network(getattr(torch, dtype))
    x = 1e-3 * torch.randn(2, *IMAGES[1:]).to(model[0].weight)
    before, drawn = model(x), torch.random.get_rng_state()
    report = va.insert_(model, block, names="0", example_input=x)
    (record,) = report.blocks
    assert report.verified == "verified in evaluation and training mode"
    new = va.inserted_blocks(model)["0"]
    assert record.identity == (identity_init, wrapper_options)
    assert record.cost.parameters == report.parameters == sum(p.numel() for p in new.parameters())
    assert all(text in str(report) for text in (identity_init, report.verified))
    for mode in (True, False):
        assert torch.equal(model.train(mode)(x), before)
    # SimAM draws no random numbers.
    assert not torch.equal(drawn, torch.random.get_rng_state()) or block is SimAM
    grads = torch.autograd.grad(model(x).float().square().sum(), list(new.parameters()), allow_unused=True)
    assert any(grad is not None and grad.any() for grad in grads)


def rare(channels):
    """Return a block that is an identity except for large values."""
    return Net(lambda block, x: x + F.relu(x - 20))


class RareConv(InPlace):
    """A block that is an identity except for large values if its convolution is zero."""

    def forward(self, x):
        return x + F.conv2d(x, self.weight, self.bias) + F.relu(x - 20)


#: Block, seed, and whether it gets a gate. With the seed 16, a ReLU returns zeros.
@pytest.mark.parametrize(("block", "seed", "gated"), [("cbam", 16, False), (rare, 0, True), (RareConv, 0, True)])
def test_a_block_is_an_identity_on_the_feature_maps_of_the_network(block, seed, gated):
    torch.manual_seed(seed)
    x, model = torch.randn(2, 3, 6, 6) * (100 if gated else 1), nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU())
    before, report = model(x), va.insert_(model, block, names="0", example_input=x)
    assert torch.equal(model(x), before)
    assert (report.output_change, report.blocks[0].identity[1].get("gated", False)) == (0, gated)


def channels_last(channels):
    """Return a block whose output has another memory format, and that is an identity at initialization."""

    def run(block, x):
        return x.movedim(1, -1).contiguous().movedim(-1, 1) * (1 + block.factor[:, None, None])

    return Net(run, factor=nn.Parameter(torch.zeros(channels)))


def test_a_block_that_is_an_identity_learns_in_a_network_that_depends_on_its_memory_format():
    last = Net(lambda net, x: x + x.is_contiguous())  # as the rounding of a convolution depends on it
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), last), torch.randn(2, 3, 4, 4)
    before = model(x)
    assert va.insert_(model, channels_last, names="0", example_input=x).blocks[0].identity == ("", {"scale": 1.0})
    assert torch.equal(model(x), before)
    model(x).square().sum().backward()
    assert all(p.grad.all() for p in va.inserted_blocks(model)["0"].parameters())


def test_a_scale_of_zero_is_refused():
    with pytest.raises(ValueError, match="scale"):
        ExactBlock(nn.Identity(), 8, torch.ones(1), scale=0.0)


def test_the_report_contains_the_output_change_of_inexact_blocks():
    model, x = network(), torch.randn(IMAGES)
    before, report = model(x), va.insert_(model, "cbam", names="0", example_input=x, exact=False)
    changed = float((model(x) - before).detach().norm() / before.detach().norm())
    assert report.output_change == pytest.approx(changed)
    assert f"{100 * changed:.2g} %" in str(report)
    assert type(va.inserted_blocks(model)["0"]).__name__ == "CbamModule"
    va.remove_(model)
    dark = nn.Sequential(nn.Conv2d(3, 8, 1))
    nn.init.zeros_(dark[0].weight), nn.init.zeros_(dark[0].bias)
    options = {"names": "0", "example_input": x, "num_heads": 2}
    assert va.insert_(dark, exact=False, gate_init=1.0, **options).output_change == 1  # the output was zero
    assert va.insert_(model, gate_init=0.5, **options).output_change > 0  # an explicit initialization is kept


@pytest.mark.parametrize("block", ["cbam", "bat", "nl", Grouped, InPlace])
def test_blocks_are_restored_with_their_initialization(block, tmp_path):
    own = {} if isinstance(block, str) else {"block": block}
    model, x = timm.create_model("tiny", num_classes=3).eval(), torch.randn(2, 3, 28, 28)
    va.insert_(model, block, names="layer1", example_input=(1, 3, 28, 28))
    plain = copy.deepcopy(model)
    va.remove_(plain)
    for parameter in va.inserted_blocks(model)["layer1.2"].parameters():
        nn.init.normal_(parameter, std=0.1)
    va.load_adapter_(plain, va.save_adapter(model, tmp_path / "adapter.safetensors"), **own)
    assert torch.equal(plain(x), model(x))
    again = va.load_model(va.save_model(model, tmp_path / "net"), **own)
    assert torch.equal(again(x), model(x))
    assert va.contribution(again, x).blocks[0].ratio > 0
    assert type(va.inserted_blocks(again)["layer1.2"]) is type(va.inserted_blocks(model)["layer1.2"])


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("block", [queries_and_keys, InPlace, Shifted])
def test_a_gate_interpolates_between_the_feature_map_and_the_block_output(block, scale):
    model, x, y = network(), torch.randn(IMAGES), network()(torch.randn(IMAGES))
    plain = model(x)
    va.insert_(model, block, names="0", example_input=x)
    wrapped = va.inserted_blocks(model)["0"]
    wrapped.scale, gate = scale, nn.init.uniform_(wrapped.gate, -1, 2).detach()[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(y.clone()), y + gate * (scale * wrapped.block(y.clone()) - y))
        with va.disabled(model):
            assert torch.equal(model(x), plain)
        nn.init.ones_(wrapped.gate)
        torch.testing.assert_close(wrapped(y.clone()), scale * wrapped.block(y.clone()))


def test_any_block_is_inserted_on_the_meta_device():
    model = network().to("meta")
    assert va.insert_(model, OwnSE, names="0", example_input=(1, 3, 14, 14)).blocks[0].identity[1] == {"scale": 2.0}
    assert {p.device.type for p in model.parameters()} == {"meta"}
