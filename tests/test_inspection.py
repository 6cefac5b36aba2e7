"""A network looked at before anything is inserted: what is counted is what happens, what is proposed can be done."""

import dataclasses
from functools import cache

import pytest
import timm
import torch
from torch import nn

import vision_attn as va
import vision_attn.networks.models
from vision_attn.attention.blocks import AttentionBlock2d, use_impl
from vision_attn.networks.insertion import SiteError
from vision_attn.networks.inspection import count_saved_bytes, example_for, inspect_model, network_of, propose
from vision_attn.networks.inspection_report import IMPLS_COUNTED, Share, Site, cost_of

#: What several tests look at is looked at once.
look = cache(inspect_model)

VARIANTS = {
    "full": {},
    "windows": {"pattern": va.Window(4)},
    "windows that pad": {"pattern": va.Window(5)},
    "rows": {"pattern": "rows"},
    "neighbourhoods": {"pattern": va.Neighborhood(3)},
    "fewer keys": {"kv_stride": 2},
    "relative positions": {"position": va.RelPosDecomposed(feat_size=(12, 12))},
    "a table that learns": {"position": va.RelPosTable(feat_size=(12, 12))},
    "dropout": {"attn_drop": 0.1},
}


def bytes_really_saved(block, x, impl):
    """What autograd holds after a forward on the CPU, without the block's own parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
    storages = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with use_impl(block, impl), torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        block(x)
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)


def assert_counted_as_saved(impl, counted_as, dtype, **options):
    block = AttentionBlock2d(32, 4, dtype=dtype, **options)
    x = torch.randn(2, 32, 12, 12, dtype=dtype, requires_grad=True)
    counted = count_saved_bytes(block, tuple(x.shape), counted_as, dtype)
    assert counted == pytest.approx(bytes_really_saved(block, x, impl), rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bytes_counted_are_those_that_autograd_keeps(variant):
    for dtype in (torch.float32, torch.bfloat16):
        for impl, counted_as in (("bmm", "bmm"), ("einsum", "bmm"), ("einx", "bmm"), ("sdpa", "sdpa")):
            assert_counted_as_saved(impl, counted_as, dtype, **VARIANTS[variant])


def test_only_fused_attention_keeps_no_weights():
    block = AttentionBlock2d(32, 4, device="meta")
    weights = 4 * (48 * 48) ** 2 * 4
    saved = {impl: count_saved_bytes(block, (1, 32, 48, 48), impl) for impl in IMPLS_COUNTED}
    assert saved["sdpa"] < weights / 30
    assert saved["bmm"] > weights


def test_each_stage_has_its_share_of_the_network():
    model = timm.create_model("resnet20").eval()
    products = []
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(
                lambda module, args, out: products.append(out.numel() * module.weight[0].numel())
            )
    found = look("resnet20")
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert found.whole.multiply_adds == sum(products)
    assert found.whole.parameters == sum(p.numel() for p in model.parameters())
    assert [site.path for site in found.sites] == ["layer1", "layer2", "layer3"]
    stem = sum(p.numel() for module in (model.conv1, model.bn1) for p in module.parameters())
    expected = [sum(p.numel() for p in module.parameters()) for module in (model.layer1, model.layer2, model.layer3)]
    expected[0] += stem
    assert [site.share.parameters for site in found.sites] == expected
    head = found.whole.multiply_adds - sum(site.share.multiply_adds for site in found.sites)
    assert head == model.fc.weight.numel()


def test_the_image_is_one_that_the_network_takes():
    grey = timm.create_model("resnet18", in_chans=1)
    assert example_for(grey, 64).shape == (1, 1, 64, 64)
    assert example_for(grey, (32, 48)).shape == (1, 1, 32, 48)
    assert example_for(timm.create_model("resnet20").bfloat16(), None).image.dtype == torch.bfloat16
    assert example_for(nn.Flatten(), None).shape == (1, 3, 224, 224)


def limited(gibibytes):
    return dataclasses.replace(look("resnet20"), memory_limit=round(gibibytes * 2**30))


def test_maps_with_nothing_to_mix_are_warned_of():
    found = look("resnet18", input_size=32)
    two, one, larger = found.warnings
    assert two.startswith("the map at 'layer3' is 2×2: attention has next to nothing to mix")
    assert one.startswith("the map at 'layer4' is 1×1")
    assert larger == "a larger input: 112×112 makes about 7×7 of a map that is 2×2"
    assert limited(1000).warnings == ()


def test_what_does_not_fit_into_memory_is_warned_of_by_implementation():
    found = limited(1)
    saved = found.sites[0].saved
    assert saved["sdpa"] < 1 << 30 < saved["bmm"]
    (warning,) = found.warnings
    assert warning.startswith("the block at 'layer1': with bmm, einx or einsum training keeps 4.1 GiB for 128 images")
    assert "more than the memory limit of 1.0 GiB: take impl='sdpa'" in warning
    tight = limited(0.04)
    assert "with any implementation training keeps 0.06 GiB" in tight.warnings[0]
    assert "a smaller batch" in tight.warnings[0]


def test_inserted_blocks_are_held_against_the_memory_together():
    both = inspect_model("resnet20", stages=[1, 2], memory_limit=0.3)
    assert dataclasses.replace(both, sites=both.sites[:1]).warnings == ()
    assert both.warnings[0].startswith("the 2 blocks together: with bmm, einx or einsum training keeps 0.31 GiB")


def stages(*maps):
    """Stages with so many channels and sides of the map, those that learn: where a block can be proposed."""
    return [
        Site(f"layer{index}", "after", "", {}, channels, (side, side), 0, 0, (1, 3, 64, 64), stage=index)
        for index, (channels, side, learns) in enumerate(maps)
        if learns
    ]


def proposed(sites, count, whole):
    """What is proposed if a block has the multiply-adds of its projections alone."""
    by_path = {site.site: site for site in sites}

    def price(path, options):
        site = by_path[path]
        heads = options["num_heads"] * options.get("key_dim", site.channels // 8)
        work = 4 * site.channels * heads * site.tokens
        return dataclasses.replace(site, options=options, multiply_adds=work)

    return [proposal.arguments for proposal in propose(sites, count, whole, price, 8, {})]


HUGE = Share(10**12, 10**12)


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        ([(64, 32, True), (64, 16, True), (64, 8, True)], [{"stages": [-2, -1]}]),
        # A map that is too small at the end, and a stem that has a good size and has learned nothing.
        ([(64, 16, False), (64, 8, True), (64, 4, True), (64, 2, True)], [{"stages": [1]}]),
        ([(64, 8, False), (64, 4, True), (64, 2, True)], [{"stages": [-2]}]),
        ([(64, 2, True), (64, 1, True)], []),
        (
            [(64, 112, False), (64, 56, True), (64, 28, True), (64, 14, True), (64, 7, True)],
            [{"stages": [-2, -1]}, {"stages": [1], "pattern": va.Window(7)}],
        ),
        ([(64, 64, True), (64, 48, True)], [{"stages": [-1], "pattern": va.Window(8)}]),
        ([(24, 14, True), (20, 7, True)], [{"stages": [-2, -1], "num_heads": 4}]),
    ],
)
def test_what_is_proposed(maps, expected):
    assert proposed(stages(*maps), len(maps), HUGE) == expected


def test_a_dear_proposal_is_followed_by_one_with_narrower_heads():
    late = stages((1024, 14, True), (2048, 7, True))
    plain, narrow = proposed(late, 2, Share(25_000_000, 4_000_000_000))
    assert plain == {"stages": [-2, -1]}
    assert narrow == {"stages": [-2, -1], "key_dim": 64, "value_dim": 64}
    (alone,) = proposed(late, 2, HUGE)
    assert alone == plain


def test_a_proposal_does_what_it_says_and_is_said():
    found = look("resnet20", input_size=96, batch_size=1)
    assert len(found.proposals) == 2
    for proposal in found.proposals:
        call = proposal.call(found.input_shape)
        assert call in str(found)
        report = eval(call, {"va": va, "model": timm.create_model("resnet20")})
        assert (report.parameters, report.multiply_adds) == cost_of(proposal.sites)
        assert [block.map_size for block in report.blocks] == [site.map_size for site in proposal.sites]


def test_stages_that_hold_a_block_are_not_proposed_and_it_is_said():
    model = timm.create_model("resnet20")
    va.insert_(model, stages=-1)
    found = inspect_model(model, batch_size=1)
    assert [site.occupied for site in found.sites] == [False, False, True]
    assert [proposal.arguments for proposal in found.proposals] == [{"stages": [0, -2]}]
    assert "layer3 (has a block)" in str(found)
    assert "(has a block)" not in str(look("resnet20"))
    eval(found.proposals[0].call(), {"va": va, "model": model})
    taken = tuple(dataclasses.replace(site, occupied=True) for site in found.sites)
    full = dataclasses.replace(found, sites=taken, proposals=(), memory_limit=1)
    assert full.warnings == ()
    assert str(full).endswith("No free stage has a map that attention is worth trying on.")


def test_no_weights_are_fetched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.hub.load_state_dict_from_url", None)
        model = network_of("torchvision:mobilenet_v3_small")
    assert sum(p.numel() for p in model.parameters()) == 2_542_856


def test_options_of_the_block_are_kept_in_what_is_proposed():
    found = inspect_model("resnet20", num_heads=4, position=va.Rope2d(), batch_size=1)
    assert [site.options["num_heads"] for site in found.sites] == [4, 4, 4]
    (proposal,) = found.proposals
    assert proposal.arguments == {"stages": [-2, -1], "num_heads": 4, "position": va.Rope2d()}
    assert [site.saved["sdpa"] for site in proposal.sites] == [site.saved["sdpa"] for site in found.sites[-2:]]
    assert "position=va.Rope2d(" in str(found)


@pytest.mark.parametrize("chosen", [{"stages": [-2, -1]}, {"names": "layer3", "at": "before"}])
def test_chosen_sites_show_what_their_blocks_cost_and_the_model_stays(chosen):
    model = timm.create_model("resnet20")
    keys = list(model.state_dict())
    found = inspect_model(model, batch_size=3, num_heads=2, pattern="rows", **chosen)
    assert list(model.state_dict()) == keys
    assert va.inserted(model) == {}
    report = va.insert_(model, **chosen, num_heads=2, pattern="rows")
    for site, record, block in zip(found.sites, report.blocks, va.inserted(model).values(), strict=True):
        assert site.path.split()[-1] == record.site
        assert ("before" in site.path) == (record.at == "before")
        assert (site.parameters, site.multiply_adds) == (record.parameters, record.multiply_adds)
        shape = (3, record.channels, *record.map_size)
        assert site.saved["bmm"] == bytes_really_saved(block, torch.randn(shape, requires_grad=True), "bmm")
    assert found.proposals == ()
    assert ("together" in str(found)) == (len(report) > 1)


def test_small_maps_are_warned_of_once():
    text = str(inspect_model("resnet18", input_size=32, stages=-1, batch_size=1))
    assert text.count("warning:") == 1


def test_a_row_of_each_table():
    found = look("resnet20")
    lines = str(found).splitlines()
    assert lines[0] == "resnet20 on images of 3×32×32: 272,474 parameters, 40,813,184 multiply-adds an image"
    assert "    2  layer3        64    8×8      64      75.5 %         32.1 %" in lines
    cells = ["2", "layer3", "8", "16,832", "+6.2", "%", "1,572,864", "+3.9", "%"]
    cells += [f"{found.sites[2].saved[impl] / 2**20:,.1f}" for impl in IMPLS_COUNTED]
    assert cells in [line.split() for line in lines]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "resnet21"}, ValueError, "there is no 'resnet21'; close to it: "),
        ({"model": "resnet20.cifar10.x"}, ValueError, "'resnet20' has no tag 'cifar10.x'; it has resnet20.cifar10"),
        ({"model": "torchvision:resnet19"}, ValueError, "Unknown model resnet19"),
        ({"model": "vit_tiny_patch16_224", "input_size": 100}, ValueError, "does not run on an example of shape"),
        ({"input_size": (1, 2, 3)}, ValueError, "input_size must be a side or a height and a width"),
        ({"input_size": 0}, ValueError, "input_size must be a side"),
        ({"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1; got 0"),
        ({"memory_limit": 0.0}, ValueError, "memory_limit must be a finite number above 0; got 0.0"),
        ({"stages": 9}, SiteError, "there is no stage 9; the stages are 0 'layer1'"),
        ({"names": "layer9"}, SiteError, "'layer9' matches no module"),
        ({"stages": 1, "names": "layer1"}, ValueError, "exactly one of stages, names and where"),
        ({"pattern": "diagonal"}, ValueError, "pattern must be one of 'full'"),
        ({"heads": 3}, TypeError, "heads"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), "input_size": 4},
            SiteError,
            "Sequential has no stages: give names=",
        ),
    ],
)
def test_what_cannot_be_done_is_said(arguments, error, message):
    with pytest.raises(error, match=message):
        inspect_model(**{"model": "resnet20", **arguments})
