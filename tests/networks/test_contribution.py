"""Contributions of blocks, compared with manual computations and with networks without the blocks."""

import copy

import pytest
import timm
import torch
from reach import anatomy
from small_networks import Net
from torch import nn

import vision_attn as va

SITES = ["layer2.2", "layer3.2"]


@pytest.fixture
def batch():
    return torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 10


@pytest.fixture
def model(batch):
    torch.manual_seed(0)
    model = timm.create_model("resnet20", num_classes=10)
    va.insert_(model, names=["layer2", "layer3"], num_heads=2, gate_init=1.0)
    with torch.no_grad():  # An untrained network predicts the same class for all images.
        model.fc.bias -= model.eval()(batch[0]).mean(0)
    return model.train()


def rms(x, axes=None):
    return x.square().mean(axes).sqrt()


def test_ratios_and_effects_equal_those_of_the_network_without_blocks(model, batch):
    seen = {}
    for site, block in va.inserted_blocks(model).items():
        block.register_forward_hook(lambda block, args, y, site=site: seen.update({site: (args[0], y - args[0])}))
    found = va.contribution(model, batch)
    assert [block.site for block in found.blocks] == SITES
    with torch.no_grad():
        model.eval()(batch[0])
    for block in found.blocks:
        stream, branch = seen[block.site]
        assert block.ratio == pytest.approx(float(rms(branch) / rms(stream)), rel=1e-4)
        assert block.ratio > 0.01
        expected = rms(branch, (0, 2, 3)) / rms(stream, (0, 2, 3))
        torch.testing.assert_close(block.ratio_per_channel, expected, rtol=1e-4, atol=0)
    # With a disabled block, the output equals that of the network without the block.
    images, labels = batch
    assert found.predictions == 32
    with torch.no_grad():
        whole, without = model.eval()(images), {}
        for site in SITES:
            other = copy.deepcopy(model)
            va.inserted_blocks(other)[site].gate.zero_()
            without[site] = other(images)
            with va.disabled(model, site):
                assert torch.equal(model(images), without[site])
        va.remove_(other := copy.deepcopy(model))
        none = other(images)
    changes = [(block.ablation, without[block.site]) for block in found.blocks]
    for found_here, scores in (*changes, (found.all_blocks, none)):
        assert found_here.predictions_changed == int((scores.argmax(1) != whole.argmax(1)).sum())
        rise = nn.functional.cross_entropy(scores, labels) - nn.functional.cross_entropy(whole, labels)
        assert found_here.loss == pytest.approx(rise.item(), rel=1e-4)
    assert found.all_blocks.predictions_changed > 0
    words = ["all", "blocks", str(found.all_blocks.predictions_changed), "of", "32", f"{found.all_blocks.loss:+.4f}"]
    assert str(found).splitlines()[4].split() == words


@pytest.mark.parametrize("most", [1, 2**24])
def test_numbers_of_blocks_equal_their_contribution_and_their_maps(model, batch, monkeypatch, most):
    monkeypatch.setattr("vision_attn.networks.contributions.MAX_WEIGHTS", most)  # one query at a time, or all
    va.insert_(model, va.AttentionBlock2d, names="layer1", pattern=va.Window(5), num_heads=2, gate_init=0.5)
    va.insert_(model, "se", names="conv1", exact=False)
    images, modes = batch[0][:4], [m.training for m in model.modules()]
    expected, found = va.contribution(model, images), va.measure_blocks(model, x=images)
    assert [m.training for m in model.modules()] == modes
    assert list(found) == [block.site for block in expected.blocks]
    assert [one["residual_ratio"] for one in found.values()] == [block.ratio for block in expected.blocks]
    gates = {"conv1": None, "layer1.2": 0.5, **dict.fromkeys(SITES, 1.0)}
    assert {site: one.get("gate") for site, one in found.items()} == gates
    with torch.no_grad(), va.capture(model.eval()) as maps:
        model(images)
    for path, attention in maps.items():
        site = path.removesuffix(".inserted.attn")
        assert found[site]["entropy"] == pytest.approx(attention.entropy().mean().item(), rel=1e-5)
    with pytest.raises(ValueError, match="no block with a residual branch"):
        va.measure_blocks(nn.ReLU(), images)
    unused = nn.ModuleDict({"used": nn.ReLU(), "unused": va.AttentionBlock2d(8, 2)})
    unused.forward = lambda x: unused["used"](x)
    assert va.measure_blocks(unused, images)["unused"]["residual_ratio"] == 0


def test_the_report_recommends_a_remedy_only_if_the_loss_is_lower_without_the_blocks(model, batch):
    images, _ = batch
    with torch.no_grad(), va.disabled(model):
        labels_without = model.eval()(images).argmax(1)
    with torch.no_grad():
        labels_with = model(images).argmax(1)
    assert not torch.equal(labels_with, labels_without)
    harmful, helpful = (va.contribution(model, (images, labels)) for labels in (labels_without, labels_with))
    assert harmful.all_blocks.loss < 0 < helpful.all_blocks.loss
    assert "lower with all blocks disabled" in str(harmful)
    assert "va.remove_(model)" in str(harmful)
    for report in (helpful, va.contribution(model, images)):
        assert "lower with all" not in str(report)
        assert "remove_" not in str(report)


def test_contribution_does_not_change_the_model(model, batch):
    model.layer1.eval()
    before = anatomy(model)
    va.contribution(model, batch[0])
    with pytest.raises(RuntimeError), va.disabled(model):
        model(torch.randn(1, 4, 32, 32))
    assert anatomy(model) == before


def test_a_new_block_contributes_zero_and_a_broken_block_nan(batch):
    model = timm.create_model("resnet20", num_classes=10)
    va.insert_(model, names="layer3")
    found = va.contribution(model, batch)
    assert (found.blocks[0].ratio, found.all_blocks.predictions_changed, found.all_blocks.loss) == (0.0, 0, 0.0)
    nn.init.constant_(va.inserted_blocks(model)["layer3.2"].gate, float("nan"))
    assert torch.isnan(torch.tensor(va.contribution(model, batch).blocks[0].ratio))


def test_blocks_of_the_network_count_and_replacements_do_not(batch):
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), va.AttentionBlock2d(8, 2, gate_init=1.0))
    found = va.contribution(dense, batch[0][:2])
    assert ([one.site for one in found.blocks], found.predictions) == (["1"], 2 * 16 * 16)
    va.insert_(dense, names="1", num_heads=2, gate_init=1.0, example_input=(1, 3, 16, 16))
    x = torch.randn(2, 3, 16, 16)
    assert {*va.measure_blocks(dense, x)} == {"1", "1.inserted"}
    va.insert_(dense, names="0", block=va.Attention2d, num_heads=2, example_input=(1, 3, 16, 16))  # in a wrapper
    assert all("entropy" in measured for measured in va.measure_blocks(dense, x).values())
    with va.disabled(dense):
        assert torch.equal(dense(x), dense[0](x))
    vit = timm.create_model("test_vit", img_size=64, num_classes=5)
    va.insert_(vit, names="blocks.0", num_heads=2, gate_init=1.0, example_input=(1, 3, 64, 64))
    assert va.contribution(vit, torch.randn(4, 3, 64, 64)).blocks[0].ratio > 0.01
    model = timm.create_model("resnet20", num_classes=10)
    va.replace_(model, names=["layer3.2.conv2", "layer2.1"], num_heads=2)  # the second one has a residual branch
    with pytest.raises(ValueError, match="model"):
        va.contribution(model, batch[0])


def test_copies_of_a_block_in_a_wrapper_are_one_block(model, batch):
    peft, sites = pytest.importorskip("peft"), list(va.inserted_blocks(model))
    config = peft.LoraConfig(target_modules=["conv1"], modules_to_save=["inserted"], r=2)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    measured = va.measure_blocks(tuned, batch[0])
    assert [site.removeprefix("base_model.model.") for site in measured] == sites
    assert all("entropy" in values for values in measured.values())
    assert len(va.contribution(tuned, batch).blocks) == len(sites)


CE, BCE = nn.functional.cross_entropy, nn.functional.binary_cross_entropy_with_logits
POOL = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
#: The layers after the block, labels, the loss of scores and labels, and the predictions.
SCORES = [
    (nn.Sequential(nn.Conv2d(8, 4, 1)), torch.arange(8 * 14**2).view(8, 14, 14) % 4, CE, lambda y: y.argmax(1)),
    # A single score is the logit of the second class.
    (POOL, torch.arange(8) % 2, lambda y, labels: BCE(y[:, 0], labels.float()), lambda y: y > 0),
]


@pytest.mark.parametrize(("head", "labels", "loss", "predict"), SCORES)
def test_scores_can_be_feature_maps_or_single_numbers(head, labels, loss, predict):
    model = Net(lambda net, x: {"out": net.head(net.conv(x))}, conv=nn.Conv2d(3, 8, 3), head=copy.deepcopy(head)).eval()
    images = torch.randn(8, 3, 16, 16)
    va.insert_(model, names="conv", num_heads=2, gate_init=5.0, example_input=images)
    with torch.no_grad():
        model.head[-1].bias -= model(images)["out"].mean()
        scores, found = model(images)["out"], va.contribution(model, (images, labels))
        with va.disabled(model):
            others = model(images)["out"]
    assert found.all_blocks.predictions_changed == int((predict(scores) != predict(others)).sum()) > 0
    assert found.all_blocks.loss == pytest.approx((loss(others, labels) - loss(scores, labels)).item(), rel=1e-3)
    assert found.predictions == labels.numel()
    with pytest.raises(IndexError, match="out of bounds"):
        va.contribution(model, (images, labels + 255))


def test_a_list_of_images_is_not_a_pair_and_missing_scores_are_reported():
    detector = nn.Sequential(nn.Conv2d(3, 8, 3), va.AttentionBlock2d(8, 2, gate_init=1.0))
    body = nn.Sequential(*detector)
    # The output has no batch axis.
    detector.forward = lambda images: [{"boxes": body(image).mean()} for image in images]
    found = va.contribution(detector, [torch.rand(3, 8, 8), torch.rand(3, 8, 9)])
    assert found.blocks[0].ratio > 0.01
    assert found.blocks[0].ratio_per_channel.shape == (8,)
    assert (found.all_blocks.predictions_changed, found.predictions) == (None, 0)
    assert "returns no class scores" in str(found).splitlines()[-1]


@torch.no_grad()
def test_blocks_are_selected_by_name_and_by_function(model, batch):
    images, outputs = batch[0][:2], []
    model.eval()
    for options in (
        {"names": "layer3.*"},
        {"names": "**.2", "where": lambda name, block: name.startswith("layer3")},
        {"where": lambda name, block: isinstance(block, va.AttentionBlock2d) and block.channels == 64},
    ):
        with va.disabled(model, **options):
            outputs.append(model(images))
    assert all(torch.equal(outputs[0], y) for y in outputs)
    assert not torch.equal(outputs[0], model(images))
    stage = Net(lambda net, x: net.conv(x), conv=nn.Conv2d(8, 8, 1))
    nested, x = nn.Sequential(nn.Conv2d(3, 8, 1), stage), images[:, :, :8, :8]
    for name in ("1", "1.conv"):  # only the block at the stage is disabled, and not the one inside it
        va.insert_(nested, names=name, num_heads=2, gate_init=1.0, example_input=x)
        nn.init.ones_(va.inserted_blocks(nested)[name].attn.proj.weight)
    with va.disabled(nested, "1"):
        y = nested(x)
    assert torch.equal(y, stage.conv(nested[0](x)))
    with pytest.raises(va.errors.SiteError, match=r"where .* layer2\.2, layer3\.2"):
        va.disabled(model, where=lambda name, block: False)


def test_wrong_sites_and_batches_are_rejected(model):
    with pytest.raises(ValueError, match=r"names: no module matches 'layer1'. Available: layer2\.2, layer3\.2"):
        va.disabled(model, ["layer1"])
    for batch in ({"images": torch.zeros(1)}, (torch.zeros(1, 3, 8, 8),), [[0]]):
        with pytest.raises(ValueError, match="batch must be images, or a pair of images and labels, as tensors, got"):
            va.contribution(model, batch)
