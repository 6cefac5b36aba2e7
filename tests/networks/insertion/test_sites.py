"""Sites: feature maps in any layout and container; before, after and inside modules; in any state of a model."""

import collections
import copy

import pytest
import timm
import torch
from reach import tensors
from small_networks import Net, copies
from torch import nn
from torchvision.models import detection, get_model, segmentation

import vision_attn as va
from vision_attn.networks.insertion.registry import inserted_keys, records
from vision_attn.networks.inspection.metadata import STAGES

Pair = collections.namedtuple("Pair", ["skip", "features"])


def tiny_vit(**options):
    return timm.create_model("vit_tiny_patch16_224", **{**SHORT, **options}).eval()


class Output(dict):
    """An output with an attribute, as in transformers."""

    def __init__(self, items, note=None):
        super().__init__(items)
        self.note = note


def tokens(y, prefix=0):
    return torch.cat([y.new_zeros(len(y), prefix, 8), y.flatten(2).transpose(1, 2)], 1)


#: A container or layout, and the position and layout of the feature map in it.
FORMS = {
    "tuple": (lambda y: (y, None), 0, "b c h w"),
    "list": (lambda y: [3, y], 1, "b c h w"),
    "namedtuple": (lambda y: Pair(None, y), 1, "b c h w"),
    "dictionary": (lambda y: {"scale": torch.ones(3), "map": y}, "map", "b c h w"),
    "dictionary with an attribute": (lambda y: Output({"map": y}, note=6), "map", "b c h w"),
    "channels last": (lambda y: y.permute(0, 2, 3, 1), None, "b h w c"),
    "tokens": (tokens, None, "b (h w) c"),
    "tokens after two others": (lambda y: tokens(y, 2), None, "b (2 + h w) c"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_feature_map_is_found_in_any_container_and_other_items_are_kept(form):
    give, *expected = FORMS[form]
    model = nn.Sequential(Net(lambda net, x: give(net.conv(x)), conv=nn.Conv2d(3, 8, 1)))
    x = torch.randn(2, 3, 6, 10)
    before = model(x)
    # With attention along rows, rows and columns are not interchangeable.
    options = {"gate_init": 1.0, "num_heads": 2, "pattern": "rows"}
    (block,) = va.insert_(model, names="0", example_input=(2, 3, 6, 10), **options).blocks
    assert [block.target.element, block.target.layout] == expected
    assert (block.channels, block.map_size) == (8, (6, 10))
    after = model(x)
    assert (type(after), getattr(after, "note", None)) == (type(before), getattr(before, "note", None))
    if form.startswith("tokens"):
        with pytest.raises(ValueError, match=r"'0' expects a grid of 6×10 tokens, got 36 tokens"):
            model(torch.randn(1, 3, 6, 6))
    torch.testing.assert_close(tensors(after), tensors(give(va.inserted_blocks(model)["0"](model[0].conv(x)))))
    assert not all(map(torch.equal, tensors(before), tensors(after)))
    va.remove_(model)
    assert all(map(torch.equal, tensors(before), tensors(model(x))))


SHORT = {"depth": 2, "img_size": 96}
#: A network of timm, its options, and the layout of its feature maps.
LAYOUTS = [
    ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "depths": (1, 1, 2, 1), "img_size": 96}, "b h w c"),
    ("vit_tiny_patch16_224", SHORT, "b (1 + h w) c"),
    pytest.param("deit_tiny_distilled_patch16_224", SHORT, "b (2 + h w) c", marks=pytest.mark.slow),
    ("cait_xxs24_224", SHORT, "b (h w) c"),  # The class token is added later.
    ("densenet121", {"growth_rate": 8, "block_config": (2, 2, 2, 2)}, "b c h w"),
]


@pytest.mark.filterwarnings("ignore:attention has little effect", "ignore:the output of the network")
@pytest.mark.parametrize(("name", "options", "layout"), LAYOUTS)
@torch.no_grad()
def test_layouts_and_modules_that_iterate_over_children(name, options, layout):
    model = timm.create_model(name, num_classes=5, **options).eval()
    for head in (module for module in model.modules() if isinstance(module, nn.Linear)):
        nn.init.normal_(head.weight, std=0.1)  # Some heads are initialized to zero.
    x = torch.randn(2, 3, *[64 if "b c h w" in layout else 96] * 2)
    keys, before = list(model.state_dict()), model(x)
    va.insert_(model, names=va.stage_names(model, x)[-2:], num_heads=3 if "tiny" in name else 4, example_input=x)
    assert [record.target.layout for record in records(model)] == [layout] * 2
    assert torch.equal(model(x), before)
    assert [key for key in model.state_dict() if key not in inserted_keys(model)] == keys
    for other in copies(model):
        for block in va.inserted_blocks(other).values():
            nn.init.normal_(block.attn.proj.weight, std=0.1)
        assert not torch.equal(other(x), before)
        assert torch.equal(model(x), before)
        va.remove_(other)
        assert torch.equal(other(x), before)
        assert list(other.state_dict()) == keys


def test_a_module_that_has_two_names_is_one_site():
    model = timm.create_model("resnet20")
    model.alias = model.layer3[2]
    assert len(va.insert_(model, names=["alias", "layer3"]).blocks) == 1


def test_a_block_at_a_sequential_does_not_run_at_another_one_that_shares_its_last_module():
    relu = nn.ReLU()
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(width, 8, 1), relu) for width in (3, 8))).eval()
    va.insert_(model, names="0", num_heads=2, gate_init=1.0, example_input=(1, 3, 8, 8))
    (block,), x = va.inserted_blocks(model).values(), torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(model(x), model[1](block(relu(model[0][0](x)))))


def test_a_module_may_receive_several_views_of_each_image():
    views = lambda net, x: net.conv(torch.cat([x, x.flip(3)])).unflatten(0, (2, -1)).mean(0)  # noqa: E731
    model = Net(views, conv=nn.Conv2d(3, 8, 1))
    (block,) = va.insert_(model, names="conv", num_heads=2, example_input=(2, 3, 8, 8)).blocks
    assert (block.channels, block.map_size) == (8, (8, 8))


def test_before_a_module_with_keyword_arguments():
    model, x = nn.Sequential(), torch.randn(1, 3, 6, 8)
    model.conv, model.inner = nn.Conv2d(3, 8, 1), nn.Identity()
    model.inner.forward = lambda scale, *, features: scale * features
    model.forward = lambda x: model.inner(2.0, features=model.conv(x))
    before = model(x)
    (block,) = va.insert_(model, names="inner", at="before", gate_init=1.0, num_heads=2, example_input=x).blocks
    assert block.target.element == "features"
    assert torch.equal(model(x), 2 * va.inserted_blocks(model)["inner"](model.conv(x)))
    va.remove_(model)
    assert torch.equal(model(x), before)


def test_stages_are_those_declared_by_a_network_or_a_part_of_it():
    stages = [f"stages.{index}" for index in range(4)]
    with torch.device("meta"):
        assert va.stage_names(timm.create_model("pvt_v2_b0")) == stages  # with pooled keys inside of the first
        part = nn.Sequential(timm.create_model("convnext_atto"), nn.Identity())
    assert va.stage_names(part) == [f"0.{name}" for name in stages]


def diffusers_encoder(name):
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return getattr(pytest.importorskip("diffusers"), name)(block_out_channels=(32, 32), **kinds)


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**{"num_hidden_layers": 2} if name == "ViT" else {})
    return getattr(transformers, f"{name}ForImageClassification")(config)


def paths(form, *indices):
    return [form.format(index) for index in indices]


LAYERS = paths("layer{}", 1, 2, 3, 4)
OF_BACKBONE, PLAIN = paths("backbone.{}", "relu", *LAYERS), {"weights": None, "weights_backbone": None}


def pyramid(name):
    return detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None)


#: A network, two sizes of its images, the smaller one pooled to one position before the head, and its stages for both.
TRUNKS = {
    "maxvit_t": (get_model, 224, 224, ["stem", *paths("blocks.{}", *range(4))]),
    "vit_b_16": (get_model, 224, 224, paths("encoder.layers.encoder_layer_{}", *range(12))),
    "vgg11": (get_model, 32, 64, paths("features.{}", 1, 4, 9, 14, 19, 20)),
    "mobilenet_v2": (get_model, 32, 64, paths("features.{}", 1, 3, 6, 13, 18)),
    "convnext_tiny": (get_model, 32, 64, paths("features.{}", 1, 3, 5, 7)),
    "shufflenet_v2_x0_5": (get_model, 32, 64, ["conv1", "maxpool", "stage2", "stage3", "conv5"]),
    "mnasnet0_5": (get_model, 32, 64, paths("layers.{}", 7, 8, 9, 11, 16)),
    "squeezenet1_1": (get_model, 128, 128, paths("features.{}", 1, 4, 7, 12)),  # the logits are a convolution
    "DeepLab": (lambda _: segmentation.deeplabv3_resnet50(**PLAIN, aux_loss=True), 128, 128, OF_BACKBONE),
    "LR-ASPP": (lambda _: segmentation.lraspp_mobilenet_v3_large(**PLAIN), 128, 128, paths("backbone.{}", 1, 3, 6, 16)),
    "a pyramid": (pyramid, 128, 128, paths("body.{}", "relu", *LAYERS)),
    "r2plus1d_18": (get_model, (4, 16, 16), (4, 32, 32), LAYERS),
    "swin3d_t": (get_model, (2, 32, 32), (4, 64, 64), paths("features.{}", 0, 2, 4, 6)),
    "mvit_v2_s": (get_model, (16, 224, 224), (16, 224, 224), paths("blocks.{}", *range(16))),
    "VQModel": (diffusers_encoder, 8, 32, [*paths("encoder.down_blocks.{}", 0, 1), "encoder.mid_block"]),
    "ConvNext": (of_transformers, 32, 224, paths("convnext.encoder.stages.{}", *range(4))),
    "Segformer": (of_transformers, 32, 224, paths("segformer.stages.{}", *range(4))),
    "ViT": (of_transformers, 224, 224, paths("vit.layers.{}", 0, 1)),
}
if timm.is_model("gemma4_vit_167m"):  # The metadata of this model contains no modules.
    TRUNKS["gemma4_vit_167m"] = timm.create_model, 128, 128, paths("encoder.blocks.{}", *range(16))


#: Networks that take about a second or more.
SLOW_TRUNKS = ("maxvit_t", "VQModel", "gemma4_vit_167m")


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW_TRUNKS)) for x in TRUNKS])
def test_inferred_stages_match_the_table_for_all_sizes(name, size):
    make, *sizes, stages = TRUNKS[name]
    side = sizes[size == "large"]
    with torch.device("meta"):
        model = make(name)
    assert va.stage_names(model, (1, 3, *(side if isinstance(side, tuple) else (side, side)))) == stages


def monai_unet():
    return pytest.importorskip("monai.networks.nets").UNet(2, 3, 2, (8, 16, 32), (2, 2), num_res_units=1)


UP = (nn.Conv2d(3, 8, 1, 2), nn.Conv2d(8, 8, 1, 2), nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 1))
TOKENS = nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.Linear(64, 64), nn.Linear(64, 64)
POOLED = (*(nn.Conv2d(3, 3, 3, 2, padding=1) for _ in range(5)), nn.AdaptiveAvgPool2d(1))


#: A network, and the message of the error.
AMBIGUOUS = [
    (lambda: nn.Sequential(*UP), r"get larger.*names=, for example '0' \(16×16\), '1' \(8×8\), '3' \(16"),
    # One module contains a downsampling and an upsampling path.
    pytest.param(monai_unet, r"larger.*'model.0' \(16×16\), .*'model.2.1' \(32×32\)", marks=pytest.mark.slow),
    # The last module is a stage of one position, or pooling.
    (lambda: nn.Sequential(*POOLED), r"larger example_input= or use names=, for example '0' .*, '3' \(2×2\)$"),
    (lambda: nn.Sequential(*TOKENS), r"tokens.* '0' \(8×8\)"),
]


@pytest.mark.parametrize(("make", "message"), AMBIGUOUS)
@pytest.mark.filterwarnings("ignore::Warning")
def test_errors_for_ambiguous_stages_suggest_modules(make, message):
    with pytest.raises(va.errors.SiteError, match=message):
        va.stage_names(make(), (1, 3, 32, 32))


def test_several_parts_with_declared_stages_are_ambiguous():
    with torch.device("meta"):
        model = nn.ModuleDict({"one": timm.create_model("resnet18"), "other": timm.create_model("resnet18")})
    model.forward = lambda x: model.one(x) + model.other(x)
    with pytest.raises(va.errors.SiteError, match="several parts of the model have stages: one, other"):
        va.insert_(model, stages=-1)
    assert va.insert_(model, names="other.layer4").blocks[0].site == "other.layer4.1"


def test_an_invalid_metadata_entry_does_not_affect_others():
    with torch.device("meta"):
        model = timm.create_model("resnet18")
    model.feature_info[2]["module"] = "nowhere"
    assert [block.site for block in va.insert_(model, stages=[1, 3]).blocks] == ["layer1.1", "layer3.1"]
    with pytest.raises(AttributeError, match="no attribute `nowhere`"):
        va.insert_(model, stages=2)


def test_an_unused_feature_map_raises_a_warning():
    model = tiny_vit(num_classes=3)
    with pytest.warns(UserWarning, match="does not depend on the feature map at 'blocks.1'"):
        report = va.insert_(model, stages=[0, 1], num_heads=3, gate_init=1.0)
    assert [block.target.used for block in report.blocks] == [True, False]
    assert report.blocks[0].target.input_shape == (1, 3, 96, 96)
    model(torch.randn(1, 3, 96, 96)).sum().backward()
    assert [bool(block.gate.grad.any()) for block in va.inserted_blocks(model).values()] == [True, False]


def test_a_feature_map_whose_values_are_detached_is_used():
    stages = nn.Sequential(*(nn.Conv2d(width, 8, 3, stride=2, padding=1) for width in (3, 8)))
    probe = Net(lambda net, x: net.head(net.stages(x).detach().mean((2, 3))), stages=stages, head=nn.Linear(8, 2))
    (block,) = va.insert_(probe, stages=-1, num_heads=2, example_input=(1, 3, 32, 32)).blocks
    assert (block.site, block.target.used) == ("stages.1", True)


@pytest.mark.parametrize(("both", "element"), [(False, 1), (True, 0)])
def test_the_used_or_declared_of_several_feature_maps_is_selected(both, element):
    """Test a stage that returns two feature maps, of which the network uses one or both."""
    model, options = nn.Sequential(), {"num_heads": 2, "example_input": (1, 3, 6, 8)}
    model.stem, model.stage = nn.Conv2d(3, 8, 1), nn.Identity()
    model.stage.forward = lambda x: (x[:, :6], 2 * x)
    model.forward = lambda x: sum(y.mean() for y in model.stage(model.stem(x))[0 if both else 1 :])
    model.feature_info = [{"module": "stem", "num_chs": 8}, {"module": "stage", "num_chs": 6}]
    assert va.stage_names(model, (1, 3, 6, 8)) == ["stem", "stage"]
    (block,) = va.insert_(model, stages=-1, **options).blocks
    assert (block.target.element, block.channels) == (element, 6 if both else 8)
    va.remove_(model)
    model.feature_info = []
    if both:
        with pytest.raises(va.errors.SiteError, match="'stage' returns 2 feature maps"):
            va.insert_(model, names="stage", **options)


#: A network, a module, and the message about its output.
NO_MAPS = [
    # Tokens of windows, channels in place of tokens, and tokens that are not in raster order.
    (lambda: timm.create_model("swin_tiny_patch4_window7_224"), "layers.0.blocks.0.attn.proj", "64, 49, 96"),
    (lambda: timm.models.MlpMixer(num_blocks=1), "blocks.0.mlp_tokens.fc1", "1, 512, 256"),
    (lambda: timm.create_model("hiera_tiny_224", stages=(1, 1, 1, 1)), "blocks.1", r"1, 784, 192\) .* mask units"),
]


@pytest.mark.parametrize(("make", "site", "message"), NO_MAPS)
def test_tensors_that_only_resemble_feature_maps_are_rejected(make, site, message):
    with torch.device("meta"):
        model = make()
    with pytest.raises(va.errors.SiteError, match=rf"'{site}' returns \({message}"):
        va.insert_(model, names=site, num_heads=1)
    assert va.inserted_blocks(model) == {}


def test_the_same_number_of_tokens_in_another_grid_is_rejected():
    model, images = tiny_vit(img_size=224, dynamic_img_size=True), torch.randn(1, 3, 112, 448)
    before = model(images)
    va.insert_(model, names="blocks.0", num_heads=3)
    for name in ("forward", "forward_features", "forward_intermediates", "get_intermediate_layers"):
        with pytest.raises(ValueError, match=r"a grid of 14×14 tokens, got 7×28 for images of 112×448"):
            getattr(copy.deepcopy(model), name)(images)
    new = copy.deepcopy(model)
    new.patch_embed.proj = nn.Conv2d(3, new.embed_dim, 16, 16)
    with pytest.raises(ValueError, match="got 7×28"):
        new(images)
    model(torch.randn(2, 3, 224, 224))
    va.remove_(model)
    assert torch.equal(model(images), before)
    assert va.insert_(model, names="blocks.0", num_heads=3, example_input=images).blocks[0].size == "7×28"
    assert torch.equal(model(images), before)


def test_the_user_declares_a_layout_and_excludes_sites():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), torch.randn(2, 3, 8, 8)
    options = {"num_heads": 2, "example_input": x}
    (block,) = va.insert_(model, names="*", exclude="1", layout="b h w c", **options).blocks
    assert (block.site, block.target.layout, block.channels) == ("0", "b h w c", 8)
    vit = nn.Sequential(Net(lambda net, x: tokens(net.conv(x), 2), conv=nn.Conv2d(3, 8, 1)))
    assert va.insert_(vit, names="0", layout="b (2 + h w) c", **options).blocks[0].map_size == (8, 8)
    for exclude, layout, message in (
        (None, "b (h w) c", "no feature map of one layout and token grid was found"),
        ("layr", None, "exclude: no module matches 'layr'"),
        ("*", None, "no module is selected: exclude"),
    ):
        with pytest.raises(va.errors.SiteError, match=message):
            va.insert_(model, names="1", exclude=exclude, layout=layout, **options)
    for at, inside in (("after", "0.1"), ("before", "0.0")):  # the block would run there
        with pytest.raises(va.errors.SiteError, match="exclude matches all selected modules"):
            va.insert_(nn.Sequential(model), names="0", exclude=inside, at=at, **options)


#: Positions of a block, and a network that calls its module ``part`` in another way if its attribute ``how`` is set.
OTHER_CALLS = [
    ("before", lambda net, x: net.part(input=x) if net.how else net.part(x), nn.Conv2d(3, 3, 1)),
    ("before", lambda net, x: net.part(x) if net.how else net.part(input=x), nn.Conv2d(3, 3, 1)),
    ("after", lambda net, x: net.part(x, net.how), Net(lambda net, x, how: (x,) if how else (x.mean(), x))),
    ("after", lambda net, x: net.part(x, net.how), Net(lambda net, x, how: x if how else (x.mean(), x))),
    ("after", lambda net, x: net.part(x, net.how), Net(lambda net, x, how: (x, x) if how else x)),
]


@pytest.mark.parametrize(("at", "run", "part"), OTHER_CALLS)
def test_a_call_without_the_feature_map_of_the_example_raises_an_error(at, run, part):
    """Such a call ran without the block in silence, or ended in an error of Python."""
    net, x = Net(run, part=part, how=False), torch.randn(1, 3, 6, 6)
    va.insert_(net, names="part", at=at, example_input=x)
    net(x)
    net.how = True
    with pytest.raises(va.errors.SiteError, match=r"'part' does not find its feature map.* Insert the block with an"):
        net(x)


@pytest.mark.parametrize(("channels_last", "block"), [(False, "LinearAttention2d"), (True, None)])
def test_a_block_runs_on_a_single_feature_map(channels_last, block):
    net = Net(lambda net, x: net.part(net.conv(x).movedim(-3, -1) if channels_last else net.conv(x)))
    net.conv, net.part = nn.Conv2d(3, 8, 1), nn.Identity()
    x = torch.randn(1, 3, 8, 6)  # as many rows as channels
    va.insert_(net, block, names="part", num_heads=2, layout="b h w c" if channels_last else "b c h w", example_input=x)
    for parameter in va.inserted_blocks(net)["part"].parameters():
        nn.init.normal_(parameter)
    torch.testing.assert_close(net(x[0]), net(x)[0])


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_declared_paths_of_stages_exist(name):
    with torch.device("meta"):
        model = get_model(name, init_weights=False)
    for path in STAGES[f"{type(model).__module__}.{type(model).__name__}"]:
        assert model.get_submodule(path)
