"""What a site can be: a map in any layout and any container, before, after and inside, in any state of a model."""

import collections
import copy
import pickle

import pytest
import timm
import torch
import torchvision
from reach import tensors
from timm.models.mlp_mixer import MlpMixer
from torch import nn
from torchvision.models import detection

import vision_attn as va
import vision_attn.networks.models
from vision_attn.networks.insertion import inserted_keys, records

Pair = collections.namedtuple("Pair", ["skip", "features"])


class Give(nn.Module):
    """Gives a map of its own in a container."""

    def __init__(self, form):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.form = form

    def forward(self, x):
        y = self.conv(x)
        return {
            "tuple": (y, None),
            "list": [3, y],
            "namedtuple": Pair(None, y),
            "dictionary": {"scale": torch.ones(3), "map": y},
            "channels last": y.permute(0, 2, 3, 1),
            "tokens": y.flatten(2).transpose(1, 2),
            "tokens after two others": torch.cat([y.new_zeros(len(y), 2, 8), y.flatten(2).transpose(1, 2)], 1),
        }[self.form]


class Network(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.give = Give(form)

    def forward(self, x):
        return self.give(x)


FORMS = {
    "tuple": (0, "b c h w"),
    "list": (1, "b c h w"),
    "namedtuple": (1, "b c h w"),
    "dictionary": ("map", "b c h w"),
    "channels last": (None, "b h w c"),
    "tokens": (None, "b (h w) c"),
    "tokens after two others": (None, "b (2 + h w) c"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_map_is_found_wherever_it_is_and_everything_else_is_left_alone(form):
    torch.manual_seed(0)
    model, x = Network(form), torch.randn(2, 3, 6, 10)
    before = model(x)
    # Along rows, so that it matters what is a row.
    options = {"gate_init": 1.0, "num_heads": 2, "pattern": "rows"}
    (block,) = va.insert_(model, names="give", example_input=(2, 3, 6, 10), **options).blocks
    assert (block.element, block.layout) == FORMS[form]
    assert (block.channels, block.map_size) == (8, (6, 10))
    after = model(x)
    assert type(after) is type(before)
    attention = va.inserted_blocks(model)["give"]
    expected = attention(model.give.conv(x))
    changed = 0
    for old, new in zip(tensors(before), tensors(after), strict=True):
        if new.shape == (2, 62, 8):
            assert torch.equal(old[:, :2], new[:, :2])
            old, new = old[:, 2:], new[:, 2:]
        if old.shape == (3,):
            assert torch.equal(old, new)
        else:
            assert not torch.equal(old, new)
            if new.dim() == 3:
                new = new.mT.reshape(2, 8, 6, 10)
            torch.testing.assert_close(new if new.shape[1] == 8 else new.permute(0, 3, 1, 2), expected)
            changed += 1
    assert changed == 1
    va.remove_(model)
    assert all(map(torch.equal, tensors(before), tensors(model(x))))


def test_a_grid_of_tokens_of_another_size_is_refused_by_name():
    model = Network("tokens")
    va.insert_(model, names="give", num_heads=2, example_input=(1, 3, 6, 10))
    with pytest.raises(ValueError, match=r"'give' is for a grid of 6×10 tokens; got 36 tokens"):
        model(torch.randn(1, 3, 6, 6))


@pytest.mark.filterwarnings("ignore:little to attend", "ignore:the output of the network")
@pytest.mark.parametrize(
    ("name", "options", "layout"),
    [
        ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "depths": (1, 1, 2, 1), "img_size": 96}, "b h w c"),
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 96}, "b (1 + h w) c"),
        ("deit_tiny_distilled_patch16_224", {"depth": 2, "img_size": 96}, "b (2 + h w) c"),
        # which says that it has a class token, and does not have it yet
        ("cait_xxs24_224", {"depth": 2, "img_size": 96}, "b (h w) c"),
        ("densenet121", {"growth_rate": 8, "block_config": (2, 2, 2, 2)}, "b c h w"),
        ("regnetx_002", {}, "b c h w"),
    ],
)
def test_layouts_of_networks_and_modules_that_loop_over_their_children(name, options, layout):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options).eval()
    for head in (module for module in model.modules() if isinstance(module, nn.Linear)):
        nn.init.normal_(head.weight, std=0.1)  # some heads begin at zero
    size = 64 if "b c h w" in layout else 96
    x = torch.randn(2, 3, size, size)
    keys = list(model.state_dict())
    with torch.no_grad():
        before = model(x)
        stages = va.stage_names(model, x)[-2:]
        heads = 3 if "tiny" in name else 4
        va.insert_(model, names=stages, num_heads=heads, example_input=x)
        assert [record.layout for record in records(model)] == [layout] * 2
        assert torch.equal(model(x), before)
        assert [key for key in model.state_dict() if key not in inserted_keys(model)] == keys
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for block in va.inserted_blocks(twin).values():
                nn.init.normal_(block.attn.proj.weight, std=0.1)
            assert not torch.equal(twin(x), before)
            assert torch.equal(model(x), before)
            va.remove_(twin)
            assert torch.equal(twin(x), before)
            assert list(twin.state_dict()) == keys


def test_a_dense_block_has_its_block_held_further_in():
    model = torchvision.models.DenseNet(8, (2, 2), 16).eval()
    x = torch.randn(1, 3, 64, 64)
    before = model(x)
    va.insert_(model, names="features.denseblock?", num_heads=4, example_input=x)
    assert list(model.features.denseblock1._modules) == ["denselayer1", "denselayer2"]
    assert {key.rpartition(".gate")[0] for key in inserted_keys(model) if key.endswith(".gate")} == {
        "features.denseblock1.denselayer1.inserted_features_denseblock1",
        "features.denseblock2.denselayer1.inserted_features_denseblock2",
    }
    assert torch.equal(model(x), before)
    # A part on its own takes its block along.
    part = copy.deepcopy(model.features.denseblock1)
    y = torch.randn(1, 16, 8, 8)
    assert torch.equal(part(y), model.features.denseblock1(y))
    assert any(".gate" in key for key, _ in part.named_parameters())


def test_a_module_that_has_two_names_is_one_site():
    model = timm.create_model("resnet20")
    model.alias = model.layer3[2]
    assert len(va.insert_(model, names=["alias", "layer3"])) == 1


def test_before_a_site_is_what_it_takes():
    torch.manual_seed(0)
    model, x = torchvision.models.resnet18().eval(), torch.randn(2, 3, 64, 64)
    before = model(x)
    (block,) = va.insert_(model, names="layer3", at="before", example_input=x).blocks
    assert (block.site, block.at, block.channels, block.map_size) == ("layer3.0", "before", 128, (8, 8))
    assert torch.equal(model(x), before)
    nn.init.normal_(va.inserted_blocks(model)["layer3.0"].attn.proj.weight, std=0.1)
    assert not torch.equal(model(x), before)
    va.remove_(model)
    assert torch.equal(model(x), before)


def test_before_a_module_that_is_called_by_keyword():
    class Inner(nn.Module):
        def forward(self, scale, *, features):
            return scale * features

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.inner = nn.Conv2d(3, 8, 1), Inner()

        def forward(self, x):
            return self.inner(2.0, features=self.conv(x))

    model, x = Outer(), torch.randn(1, 3, 6, 8)
    before = model(x)
    (block,) = va.insert_(model, names="inner", at="before", gate_init=1.0, num_heads=2, example_input=x).blocks
    assert block.element == "features"
    expected = 2 * va.inserted_blocks(model)["inner"](model.conv(x))
    assert torch.equal(model(x), expected)
    va.remove_(model)
    assert torch.equal(model(x), before)


BRANCHES = {
    "torchvision resnet18": (lambda: torchvision.models.resnet18(), "layer2.0", "layer2.0.bn2"),
    "timm convnext": (lambda: timm.create_model("convnext_atto"), "stages.1.blocks.1", "stages.1.blocks.1.drop_path"),
    "pre-activation": (lambda: timm.create_model("resnetv2_18"), "stages.1.blocks.1", "stages.1.blocks.1.drop_path"),
    "cifar, padded shortcut": (lambda: timm.create_model("resnet20_a"), "layer2.0", "layer2.0.bn2"),
    "vision transformer": (
        lambda: timm.create_model("vit_tiny_patch16_224", depth=3, img_size=64),
        "blocks.1",
        "blocks.1.drop_path2",
    ),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_the_end_of_a_branch_is_found_before_its_addition(case):
    make, site, end = BRANCHES[case]
    heads = 3 if "transformer" in case else 4
    (block,) = va.insert_(make(), names=site, at="branch", num_heads=heads, example_input=(1, 3, 64, 64)).blocks
    assert (block.site, block.at) == (end, "after")


def test_stages_are_those_declared_by_a_network_or_a_part_of_it():
    stages = ["stages.0", "stages.1", "stages.2", "stages.3"]
    with torch.device("meta"):
        assert va.stage_names(timm.create_model("pvt_v2_b0")) == stages  # with pooled keys inside of the first
        part = nn.Sequential(timm.create_model("convnext_atto"), nn.Identity())
    assert va.stage_names(part) == [f"0.{name}" for name in stages]


def diffusers_encoder(name):
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return getattr(pytest.importorskip("diffusers"), name)(block_out_channels=(32, 32), **kinds)


def of_transformers(name, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}ForImageClassification")(config)


def odd(last):
    return [f"features.{index}" for index in range(1, last + 1, 2)]


#: A network, two sizes of its images, the smaller one pooled to a cell before the head, and its stages for both.
TRUNKS = {
    "maxvit_t": (224, 224, ["stem", *(f"blocks.{index}" for index in range(4))]),
    "vit_b_16": (224, 224, [f"encoder.layers.encoder_layer_{index}" for index in range(12)]),
    "vgg11": (32, 64, [f"features.{index}" for index in (1, 4, 9, 14, 19, 20)]),
    "mobilenet_v2": (32, 64, [f"features.{index}" for index in (1, 3, 6, 13, 18)]),
    "mobilenet_v3_large": (32, 64, [f"features.{index}" for index in (1, 3, 6, 12, 16)]),
    "efficientnet_v2_s": (32, 64, [f"features.{index}" for index in (1, 2, 3, 5, 7)]),
    "convnext_tiny": (32, 64, odd(7)),
    "swin_t": (32, 64, odd(7)),
    "shufflenet_v2_x0_5": (32, 64, ["conv1", "maxpool", "stage2", "stage3", "conv5"]),
    "mnasnet0_5": (32, 64, [f"layers.{index}" for index in (7, 8, 9, 11, 16)]),
    "r2plus1d_18": ((4, 16, 16), (4, 32, 32), [f"layer{index}" for index in range(1, 5)]),
    "swin3d_t": ((2, 32, 32), (4, 64, 64), [f"features.{index}" for index in (0, 2, 4, 6)]),
    "mvit_v2_s": ((16, 224, 224), (16, 224, 224), [f"blocks.{index}" for index in range(16)]),
    "AutoencoderKL": (8, 32, ["encoder.down_blocks.0", "encoder.down_blocks.1", "encoder.mid_block"]),
    "VQModel": (8, 32, ["encoder.down_blocks.0", "encoder.down_blocks.1", "encoder.mid_block"]),
    "ResNet": (32, 224, [f"resnet.encoder.stages.{index}" for index in range(4)]),
    "ConvNext": (32, 224, [f"convnext.encoder.stages.{index}" for index in range(4)]),
    "Segformer": (32, 224, [f"segformer.stages.{index}" for index in range(4)]),
    "ViT": (224, 224, [f"vit.layers.{index}" for index in range(2)]),
}


@pytest.mark.parametrize("name", TRUNKS)
def test_stages_of_networks_that_declare_none_are_in_a_table_and_the_same_for_all_sizes(name):
    small, large, stages = TRUNKS[name]
    with torch.device("meta"):
        if name in ("AutoencoderKL", "VQModel"):
            model = diffusers_encoder(name)
        elif name[0].isupper():
            model = of_transformers(name, **{"num_hidden_layers": 2} if name == "ViT" else {})
        else:
            model = torchvision.models.get_model(name)
    for size in (small, large):
        shape = (1, 3, *(size if isinstance(size, tuple) else (size, size)))
        assert va.stage_names(model, shape) == stages


@pytest.mark.skipif(not timm.is_model("gemma4_vit_167m"), reason="this timm has none")
def test_a_declaration_that_names_no_modules_is_replaced_by_the_table():
    with torch.device("meta"):
        gemma = timm.create_model("gemma4_vit_167m")
    assert va.stage_names(gemma, (1, 3, 128, 128)) == [f"encoder.blocks.{index}" for index in range(16)]


def test_the_last_stage_takes_a_block_before_it_and_not_before_the_network():
    model = torchvision.models.vgg11().eval()
    (block,) = va.insert_(model, stages=-1, at="before", example_input=(1, 3, 64, 64)).blocks
    assert (block.site, block.size) == ("features.20", "4×4")


#: What no stage can be told in, and what the message says and names.
WITHOUT_STAGES = {
    "maps that become larger again": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1, 2), nn.Conv2d(8, 8, 1, 2), nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 1)
        ),
        32,
        r"become larger again.*names=, as among '0' \(16×16\), '1' \(8×8\), '3' \(16",
    ),
    "a way down and up inside of one module": (
        lambda: pytest.importorskip("monai.networks.nets").UNet(2, 3, 2, (8, 16, 32), (2, 2), num_res_units=1),
        32,
        r"larger again.*'model.0' \(16×16\), 'model.1.submodule.1' \(8×8\), .*'model.2.1' \(32×32\)",
    ),
    "a stage of one cell, or pooling": (
        lambda: nn.Sequential(*(nn.Conv2d(3, 3, 3, 2, padding=1) for _ in range(5)), nn.AdaptiveAvgPool2d(1)),
        32,
        r"so small nothing tells a stage of one cell from pooling: give a larger .* as among '0' .*, '3' \(2×2\)$",
    ),
    "tokens": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), *(nn.Linear(64, 64) for _ in range(3))),
        32,
        r"most of its modules give tokens or no map: choose .* '0' \(8×8\)",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_STAGES)
@pytest.mark.filterwarnings("ignore::Warning")
def test_where_stages_cannot_be_told_modules_are_named_to_choose_from(case):
    make, size, message = WITHOUT_STAGES[case]
    with pytest.raises(va.SiteError, match=message):
        va.stage_names(make(), (1, 3, size, size))


def test_of_several_parts_that_declare_stages_none_is_chosen():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = timm.create_model("resnet18"), timm.create_model("resnet18")

        def forward(self, x):
            return self.one(x) + self.other(x)

    with torch.device("meta"):
        pair = Pair()
    with pytest.raises(va.SiteError, match="several parts declare them, one, other: choose sites by"):
        va.insert_(pair, stages=-1)
    assert va.insert_(pair, names="other.layer4").blocks[0].site == "other.layer4.1"


@pytest.mark.parametrize("state", ["half precision", "channels last", "compiled in place", "data parallel"])
def test_a_model_stays_in_its_state(state):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()).eval()
    x = torch.randn(2, 3, 32, 32)
    if state == "half precision":
        model, x = model.half(), x.half()
    elif state == "channels last":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    elif state == "compiled in place":
        model[2].compile(backend="eager")
    else:
        model = nn.DataParallel(model)
    with torch.no_grad():
        before = model(x)
        va.insert_(model, stages=[-2, -1], num_heads=2, example_input=x)
        assert {p.dtype for block in va.inserted_blocks(model).values() for p in block.parameters()} == {x.dtype}
        assert torch.equal(model(x), before)
        assert state != "channels last" or model(x).is_contiguous(memory_format=torch.channels_last)
        va.remove_(model)
        assert torch.equal(model(x), before)


def test_a_map_that_nothing_is_read_of_is_warned_of():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3).eval()
    with pytest.warns(UserWarning, match="the output of the network does not depend on the map at 'blocks.1'"):
        report = va.insert_(model, stages=[0, 1], num_heads=3, gate_init=1.0)
    assert [block.read for block in report.blocks] == [True, False]
    x = torch.randn(1, 3, 224, 224)
    model(x).sum().backward()
    assert [bool(block.gate.grad.any()) for block in va.inserted_blocks(model).values()] == [True, False]


class Two(nn.Module):
    """A stage that gives two maps, of which one or both are read."""

    def __init__(self, both):
        super().__init__()
        self.stem, self.stage, self.head = nn.Conv2d(3, 8, 1), Give("tuple"), nn.Conv2d(8, 2, 1)
        self.stage.forward = lambda x: (x[:, :6], 2 * x)
        self.both = both
        self.feature_info = [{"module": "stem", "num_chs": 8}, {"module": "stage", "num_chs": 6}]

    def forward(self, x):
        aside, main = self.stage(self.stem(x))
        return self.head(main) + (aside.mean() if self.both else 0)


@pytest.mark.parametrize(("both", "element"), [(False, 1), (True, 0)])
def test_of_several_maps_it_is_the_one_that_is_read_or_else_the_one_that_is_declared(both, element):
    model = Two(both)
    assert va.stage_names(model, (1, 3, 6, 8)) == ["stem", "stage"]
    (block,) = va.insert_(model, stages=-1, num_heads=2, example_input=(1, 3, 6, 8)).blocks
    assert (block.element, block.channels) == (element, 6 if both else 8)
    va.remove_(model)
    model.feature_info = []
    if both:
        with pytest.raises(va.SiteError, match="'stage' returns 2 maps"):
            va.insert_(model, names="stage", num_heads=2, example_input=(1, 3, 6, 8))


def test_a_network_that_became_a_part_of_another_keeps_its_blocks():
    torch.manual_seed(0)
    backbone, x = torchvision.models.DenseNet(8, (2, 2), 16, num_classes=4).eval(), torch.randn(1, 3, 64, 64)
    before = backbone(x)
    va.insert_(backbone, names=["features.denseblock1", "features.norm5"], num_heads=4, gate_init=1.0, example_input=x)
    model = nn.Sequential(backbone, nn.Identity())
    assert [record.site for record in records(model)] == ["0.features.denseblock1", "0.features.norm5"]
    assert {key.split(".")[0] for key in inserted_keys(model)} == {"0"}
    assert not torch.equal(model(x), before)
    assert [block.site for block in va.remove_(model).blocks] == ["0.features.denseblock1", "0.features.norm5"]
    assert torch.equal(model(x), before)


NO_MAPS = {
    "tokens of windows": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1), num_heads=(3, 6)),
        "layers.0.blocks.0.attn.proj",
        r"\(64, 49, 96\) for images",
    ),
    "channels in the place of tokens": (
        lambda: MlpMixer(patch_size=16, num_blocks=1, embed_dim=512),
        "blocks.0.mlp_tokens.fc1",
        r"\(1, 512, 256\) for images",
    ),
    "tokens in an order of their own": (
        lambda: timm.create_model("hiera_tiny_224", stages=(1, 1, 1, 1)),
        "blocks.1",
        r"\(1, 784, 192\) .* the tokens of Hiera are in the order of its mask units: choose another module",
    ),
}


@pytest.mark.parametrize("case", NO_MAPS)
def test_what_has_the_shape_of_a_map_and_is_none_is_refused(case):
    make, site, message = NO_MAPS[case]
    with torch.device("meta"):
        model = make()
    with pytest.raises(va.SiteError, match=message):
        va.insert_(model, names=site, num_heads=1)
    assert va.inserted_blocks(model) == {}


def test_tokens_in_as_many_cells_of_another_grid_are_refused():
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, depth=2).eval()
    images = torch.randn(1, 3, 112, 448)
    before = model(images)
    va.insert_(model, names="blocks.0", num_heads=3)
    with pytest.raises(ValueError, match=r"for a grid of 14×14 tokens; got 7×28 for images of 112×448"):
        copy.deepcopy(model)(images)
    model(torch.randn(2, 3, 224, 224))
    va.remove_(model)
    assert torch.equal(model(images), before)
    assert va.insert_(model, names="blocks.0", num_heads=3, example_input=images).blocks[0].size == "7×28"
    assert torch.equal(model(images), before)


def test_the_user_says_how_a_map_lies_where_its_shape_does_not_and_which_sites_are_left_out():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), torch.randn(2, 3, 8, 8)
    options = {"num_heads": 2, "example_input": x}
    (block,) = va.insert_(model, names="*", exclude="1", layout="b h w c", **options).blocks
    assert (block.site, block.layout, block.channels) == ("0", "b h w c", 8)
    with pytest.raises(va.SiteError, match="no feature map was found"):
        va.insert_(model, names="1", layout="b (h w) c", **options)
    with pytest.raises(va.SiteError, match="exclude: 'layr' matches no module"):
        va.insert_(model, names="1", exclude="layr", **options)
    with pytest.raises(va.SiteError, match="no module is chosen"):
        va.insert_(model, names="1", exclude="*", **options)


def test_a_network_says_the_size_of_its_images():
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=2)
    assert va.insert_(model, names="blocks.0", num_heads=3).blocks[0].input_shape == (1, 3, 96, 96)


def test_one_bad_entry_of_a_declaration_spoils_no_other():
    with torch.device("meta"):
        model = timm.create_model("resnet18")
    model.feature_info[2]["module"] = "nowhere"
    assert [block.site for block in va.insert_(model, stages=[1, 3]).blocks] == ["layer1.1", "layer3.1"]
    with pytest.raises(va.SiteError, match="declares 'nowhere' as a stage and has no such module"):
        va.insert_(model, stages=2)


def test_what_only_features_are_given_of_is_read_by_a_detector():
    torch.manual_seed(0)
    backbone = detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None, returned_layers=[4])
    anchors = detection.rpn.AnchorGenerator(((32,), (64,)), ((1.0,),) * 2)
    model = detection.FasterRCNN(backbone, 5, min_size=64, max_size=96, rpn_anchor_generator=anchors).eval()
    images = [torch.rand(3, 48, 64)]
    (block,) = va.insert_(model, names="backbone.body", example_input=images).blocks
    assert (block.element, block.read) == ("0", True)
    with torch.no_grad():
        before = model(images)[0]["scores"]
        nn.init.normal_(va.inserted_blocks(model)["backbone.body"].attn.proj.weight)
        assert not torch.equal(model(images)[0]["scores"], before)
