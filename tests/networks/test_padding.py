"""A batch of padded images has the outputs of each image alone."""

import gc
import inspect
from contextlib import nullcontext
from functools import partial
from itertools import cycle

import pytest
import timm
import torch
from impls import CPU_IMPLS
from small_networks import Net, resnet
from torch import nn
from torch.utils.checkpoint import checkpoint

import vision_attn as va
from vision_attn.attention import recomputation
from vision_attn.networks.inspection.metadata import read_metadata

SIZES = [(9, 14), (9, 7), (5, 14), (6, 5)]
FULL = (9, 14)


def batch(sizes=SIZES, channels=16, full=FULL):
    """Return images of these sizes, and their batch, whose padding is not zero."""
    alone = [torch.randn(1, channels, *size) for size in sizes]
    x = torch.full((len(sizes), channels, *full), 7.0)
    for i, image in enumerate(alone):
        x[(i, slice(None), *map(slice, image.shape[2:]))] = image[0]
    return alone, x


def mask_of(sizes, full=FULL, stride=1):
    mask = torch.zeros(len(sizes), *(stride * n for n in full), dtype=torch.bool)
    for image, size in zip(mask, sizes, strict=True):
        image[tuple(slice(stride * n) for n in size)] = True
    return mask


def difference(y, expected):
    """Return the largest difference of a batch and the output for each image alone."""
    parts = [(y[(i, slice(None), *map(slice, z.shape[2:]))], z[0]) for i, z in enumerate(expected)]
    return max((found - z).abs().max().item() for found, z in parts)


OPTIONS = [
    {}, {"pattern": "rows"}, {"pattern": "columns"}, {"pattern": va.Window(4), "position": va.RelPosTable()},
    {"pattern": va.Window(4, shift=2)}, {"position": va.Rope(), "key_dim": 8}, {"position": va.SinCos()},
    {"position": va.ConditionalPos(3)}, {"qk_norm": True}, {"qk_norm": "cosine", "num_kv_heads": 2},
    {"qk_norm": "match"}, {"qk_norm": "match", "kv_stride": 2}, {"kv_stride": 2}, {"kv_stride": 7}, {"causal": True},
    {"groups": 2, "output_gate": True},
]  # fmt: skip


LINEAR = [partial(va.blocks.LinearAttention2d, feature_map=name) for name in ("softmax", "elu", "relu", "none")]
#: A block, the sizes of its feature maps, the size of the batch, the tolerance, and a second implementation, because an
#: implementation only receives another mask for a padded batch.
CASES = [
    *((partial(va.Attention2d, **how), SIZES, FULL, 2e-6, impl) for how, impl in zip(OPTIONS, cycle(CPU_IMPLS))),
    *((block, SIZES, FULL, 2e-5, "einx") for block in LINEAR),
    (va.blocks.Attention1d, [(9,), (4,)], (9,), 1e-6, "einx"),
    (partial(va.blocks.AttentionBlock3d, gate_init=1.0), [(2, 4, 5), (3, 2, 4)], (3, 4, 5), 1e-6, "bmm"),
]


@pytest.mark.parametrize(("build", "sizes", "full", "tolerance", "impl"), CASES, ids=str)
@torch.no_grad()
def test_a_padded_batch_equals_each_image_alone(build, sizes, full, tolerance, impl):
    torch.manual_seed(0)
    block = build(16, 4).eval()
    alone, x = batch(sizes, 16, full)
    expected = [block(image) for image in alone]
    for one in ("auto", impl):
        va.set_impl_(block, one)
        assert difference(block(x), expected) > 1e-2
        for valid in (sizes, mask_of(sizes, full), mask_of(sizes, full, stride=4)):
            with va.padded(block, valid):
                assert difference(block(x), expected) < tolerance


@torch.no_grad()
def test_a_mask_of_the_call_and_a_context_are_combined_with_the_padding():
    torch.manual_seed(0)
    block, sizes = va.Attention2d(16, 4, context_channels=8), [(10, 14), (10, 7), (5, 14), (6, 5)]
    alone, x = batch(sizes, full=(10, 14))
    contexts, context = batch([((h + 1) // 2, (w + 1) // 2) for h, w in sizes], 8, (5, 7))
    allowed = torch.rand(4, 1, 1, 35) < 0.8
    with va.padded(block, sizes):
        y = block(x, allowed, context)
    for i, (image, other) in enumerate(zip(alone, contexts, strict=True)):
        (h, w), (rows, columns) = image.shape[2:], other.shape[2:]
        mask = allowed[i : i + 1].unflatten(3, (5, 7))[..., :rows, :columns].flatten(3)
        torch.testing.assert_close(y[i, :, :h, :w], block(image, mask, other)[0])
    with pytest.raises(ValueError, match=r"a feature map of \(11, 1\) is not one"), va.padded(block, sizes):
        block(x, context=torch.randn(4, 8, 11, 1))


def network():
    model = resnet()
    va.insert_(model, names="layer3", gate_init=1.0, num_heads=8, example_input=(1, 3, 64, 96))
    return model


@torch.no_grad()
def test_maps_do_not_contain_the_padding():
    """``test_networks.py`` compares a padded network with each image alone."""
    model = network()
    with va.padded(model, [(64, 64)]), va.capture(model) as maps:
        model(torch.randn(1, 3, 64, 128))
    (attention,) = maps.values()
    assert attention.weights[..., 4:].abs().max() == 0
    torch.testing.assert_close(attention.weights[..., :4].sum((3, 4)), torch.ones(1, 8, 4 * 8))


@torch.no_grad()
def test_positions_of_an_odd_number_of_pixels_are_those_of_strided_convolutions():
    model = nn.Sequential(*(nn.Conv2d(width, 4, 3, stride=2, padding=1) for width in (3, 4, 4, 4, 4)))
    model.append(va.AttentionBlock2d(4, 1))
    with va.padded(model, [(80, 129)]), va.capture(model) as maps:
        model(torch.randn(1, 3, 129, 129))
    assert [bool(row.any()) for row in maps["5.attn"].weights[0, 0, 0]] == [True, True, True, False, False]


@torch.no_grad()
def test_a_compiled_model_with_a_padded_batch_runs_in_eager_mode():
    model, x = network(), torch.randn(2, 3, 64, 96)
    expected, compiled = model(x), torch.compile(model, backend=lambda *_: pytest.fail("the model was compiled"))
    with va.padded(compiled, [(64, 96), (64, 96)]):
        torch.testing.assert_close(compiled(x), expected)


def test_a_function_that_recomputes_without_keeping_its_scopes_is_refused():
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(x, model):
            return model(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])
            ctx.model = inputs[1]

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(ctx.model(x), x, gradient)[0], None

    block, x = va.AttentionBlock2d(8, 2, gate_init=1.0), torch.randn(2, 8, 6, 6, requires_grad=True)
    Recompute.apply(x, block).sum().backward()
    for inside in (True, False):
        with va.padded(block, [(6, 6), (4, 5)]):
            y = Recompute.apply(x, block)
        scope = va.padded(block, [(6, 6), (4, 5)]) if inside else nullcontext()
        with scope, pytest.raises(RuntimeError, match=r"keep the with block.*va\.padded"):
            y.sum().backward()


@pytest.mark.parametrize("name", ["unpack_hook", "gen", "new_frame", "frame"])
def test_other_names_in_torch_are_refused(name, monkeypatch):
    """A release of torch that renames a function or a variable must lead to an error, not to other values."""
    source = inspect.getsource(recomputation.running_segments)
    assert f'"{name}"' in source
    names = dict(vars(recomputation))
    exec(source.replace(f'"{name}"', f'"{name}_of_a_later_release"'), names)
    monkeypatch.setattr("vision_attn.attention.scopes.running_segments", names["running_segments"])
    block, x = va.AttentionBlock2d(8, 2, gate_init=1.0), torch.randn(2, 8, 6, 6, requires_grad=True)

    def train():
        with va.padded(block, [(6, 6), (4, 5)]):
            y = checkpoint(block, x, use_reentrant=False)
        y.sum().backward()

    with pytest.raises(RuntimeError, match=r"tested version|keep the with block"):
        train()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_mask_that_changes_before_it_is_used_again_is_refused(use_reentrant):
    block, x = va.AttentionBlock2d(8, 2, gate_init=1.0), torch.randn(1, 8, 6, 6, requires_grad=True)
    mask = mask_of([(4, 5)], (6, 6))
    with va.padded(block, mask):
        y = checkpoint(block, x, use_reentrant=use_reentrant)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_parts_of_segments_run_again_as_they_ran_first(use_reentrant):
    """A compiled part runs eagerly in a ``with`` block, and saves other tensors for its gradients then."""
    block, x = va.AttentionBlock2d(8, 2, gate_init=1.0), torch.randn(2, 8, 6, 6, requires_grad=True)
    compiled, product = torch.compile(block, backend="aot_eager"), lambda x: x.sin() * (x.cos() * x.exp()).tanh()
    part = torch.compile(product, backend="aot_eager")
    cases = [(lambda x: part(block(x)), lambda x: product(block(x))), (compiled, block), (part, product)]
    scopes = [nullcontext, partial(va.capture, block), partial(va.padded, block, [(6, 6), (4, 5)])]
    for first, second in [(0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]:
        for function, plain in cases:
            with scopes[first]():
                y, other = checkpoint(function, x, use_reentrant=use_reentrant), plain(x)
            with scopes[second]():
                y.square().sum().backward()
            torch.testing.assert_close(x.grad, torch.autograd.grad(other.square().sum(), x)[0])
            x.grad = None
    with torch.compiler.set_stance("force_eager"):
        with va.capture(block):
            pass
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert torch._dynamo.eval_frame._stance.stance == "default"
    del y
    gc.collect()
    with va.capture(block):
        pass
    assert type(torch._dynamo.eval_frame._stance.stance) is str, "the stance of the library outlives the graphs"


def test_blocks_on_two_devices():
    model = nn.Sequential(*(va.AttentionBlock2d(8, 2, device=device) for device in ("cpu", "meta")))
    model[1].register_forward_pre_hook(lambda module, args: args[0].to("meta"))
    with va.padded(model, [(6, 6), (4, 5)]):
        assert model(torch.randn(2, 8, 6, 6)).device.type == "meta"


def test_models_that_pad_their_images_have_a_warning():
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    with torch.device("meta"):
        detector = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    assert read_metadata(detector).pads_images
    assert not read_metadata(network()).pads_images
    detr = nn.Module()
    detr.forward = pytest.importorskip("transformers").ConditionalDetrForObjectDetection.forward
    assert read_metadata(detr).pads_images
    model = network()
    model.forward = lambda images, pixel_mask=None: type(model).forward(model, images)
    with pytest.warns(UserWarning, match=r"va\.padded"):
        va.insert_(model, names="layer2", num_heads=1, example_input=(1, 3, 64, 64))


def test_wrong_arguments_are_rejected():
    model, x = network(), torch.randn(2, 3, 64, 96)
    for valid, message in (
        (mask_of([(2, 3)] * 2, (2, 3), 32).float(), "valid must be bool"),
        ([(64, 97), (64, 96)], r"at most image_size=\(64, 96\)"),
        ([(64, -1), (64, 96)], r"one size for each image, .*got \[\(64, -1\)"),
        ([(64,), (64,)], "one size for each image"),
        ([64, 96], "valid must be a list of sizes, got int"),
        (torch.tensor([(64, 96), (64, 64)]), r"sizes with valid\.tolist\(\)"),
        ([(64, 96)], "got 1 for a batch of 2"),
        ([(64, 96)] * 3, "got 3 for a batch of 2"),
        (torch.ones(2, 1, 64, 96) > 0, r"\(4, 6\) is not one of images of \(1, 64, 96\)"),
        (torch.ones(2, 96, 64) > 0, r"\(4, 6\) is not one of images of \(96, 64\)"),
    ):
        with pytest.raises(ValueError, match=message), va.padded(model, valid):
            model(x)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    run = lambda net, images: net.model(pad([x.movedim(2, 0) for x in images]).permute(0, 2, 3, 1))  # noqa: E731
    detector, images = Net(run, model=model), [torch.randn(3, 64, 96), torch.randn(3, 64, 64)]  # pads its images
    with pytest.raises(ValueError, match="image_size must be given"), va.padded(detector, [(64, 96), (64, 64)]):
        detector(images)
    with va.padded(detector, [(64, 96), (64, 64)], image_size=(64, 96)):
        detector(images)
    with pytest.raises(ValueError, match="traced or exported"), va.padded(model, [(64, 96)] * 2):
        torch.export.export(model, (x,))
    for other in (nn.Sequential(nn.Conv2d(3, 8, 1)), timm.create_model("test_vit")):
        va.swap_(other)
        with pytest.raises(ValueError, match="model must have blocks on feature maps"):
            va.padded(other, [(64, 96)])


@pytest.mark.parametrize("build", [va.Attention2d, va.blocks.LinearAttention2d, partial(va.Attention2d, kv_stride=2)])
def test_padding_that_is_not_finite_does_not_reach_the_images(build):
    torch.manual_seed(0)
    block, x = build(8, 2).eval(), torch.randn(2, 8, 6, 8)
    with va.padded(block, [(6, 8), (6, 4)]):
        expected = block(x)
        x[1, ..., 4:] = torch.nan
        found = block(x)
    torch.testing.assert_close(found[1, ..., :4], expected[1, ..., :4])
    torch.testing.assert_close(found[:1], expected[:1])


class Picture(torch.Tensor):
    """Images in a subclass of tensors, as those of MONAI and fastai."""


def test_images_of_a_subclass_of_tensors_are_data():
    block, x = va.AttentionBlock2d(16, 2, gate_init=1.0, pattern=va.Window(4)).eval(), torch.randn(2, 16, 12, 16)
    with va.padded(block, [(12, 16), (7, 9)]):
        expected, found = block(x), block(x.as_subclass(Picture))
        kept = len(block.attn.plans.recent)
        block(x.as_subclass(Picture))
    assert type(found) is Picture
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
    assert len(block.attn.plans.recent) == kept == 1  # images of both classes share a plan


@pytest.mark.parametrize(
    ("position", "kv_stride"), [(va.Rope(100.0, normalized=True), 1), (va.Rope(), 1), (va.Rope(9.0), 2)]
)
def test_rotary_positions_that_depend_on_the_padded_size_are_refused(position, kv_stride):
    block = va.Attention2d(16, 2, position=position, kv_stride=kv_stride)
    x, context = torch.randn(2, 16, 6, 9), torch.randn(2, 16, 12, 18) if position == va.Rope() else None
    with va.padded(block, [(6, 9), (6, 5)]), pytest.raises(ValueError, match=r"va\.padded does not support Rope"):
        block(x, context=context)


def test_rotary_positions_of_features_from_outside_are_refused():
    """``test_networks.py`` compares features from outside, which are not padded, without rotary positions."""
    model, options = nn.Sequential(nn.Conv2d(3, 8, 1)), {"context_channels": 4, "position": va.Rope()}
    va.insert_(model, names="0", num_heads=2, example_input=(2, 3, 6, 9), **options)
    refused = pytest.raises(ValueError, match=r"Rope\(.*\) with va\.context")
    with va.context(model, torch.randn(2, 4, 7, 5)), va.padded(model, [(6, 9), (6, 4)]), refused:
        model(torch.randn(2, 3, 6, 9))
