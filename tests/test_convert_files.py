"""Files of other libraries' weights become ours, by the command; and blocks become other libraries' layers."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.layers import Attention as TimmAttention
from timm.models.maxxvit import Attention2d as MaxxVit
from torch import nn

import vision_attn as va
from vision_attn.networks import convert
from vision_attn.tools.cli import main


def diffusers_attention(*given, **options):
    """Imported in a test, for it takes seconds."""
    from diffusers.models.attention_processor import Attention

    return Attention(*given, **options)


LAYERS = {
    "torch-mha": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "timm": lambda: TimmAttention(8, 2, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm),
    "timm-maxxvit": lambda: MaxxVit(8, dim_head=4),
    "diffusers": lambda: diffusers_attention(8, heads=2, dim_head=4),
}


def run(layer, x):
    if isinstance(layer, MaxxVit):
        return layer(x)
    tokens = x.flatten(2).mT
    y = layer(*[tokens] * 3)[0] if isinstance(layer, nn.MultiheadAttention) else layer(tokens)
    return y.mT.view(x.shape)


def written(folder, layout, **beside):
    """A network of two such layers and a convolution, in a file."""
    torch.manual_seed(0)
    layers = [LAYERS[layout]() for _ in range(2)]
    for parameter in nn.ModuleList(layers).parameters():
        nn.init.normal_(parameter, std=0.5)
    state = {f"blocks.{i}.attn.{key}": x for i, layer in enumerate(layers) for key, x in layer.state_dict().items()}
    torch.save({"state_dict": {**state, "stem.weight": torch.ones(3), **beside}}, folder / "in.pth")
    return layers, ["convert", str(folder / "in.pth"), str(folder / "out.safetensors"), "--from", layout]


@pytest.mark.parametrize("layout", LAYERS)
def test_a_converted_file_loads_into_blocks_that_compute_the_same(layout, tmp_path, capsys):
    layers, command = written(tmp_path, layout)
    assert main([*command, "--prefix", "blocks.*.attn", "--num-heads", "2", "--dry-run"]) == 0
    assert not (tmp_path / "out.safetensors").exists()
    assert "nothing was written" in capsys.readouterr().out
    assert main([*command, "--prefix", "blocks.*.attn", "--num-heads", "2"]) == 0
    shown = capsys.readouterr().out
    assert "blocks.1.attn.qkv.weight" in shown
    assert "24×8×1×1" in shown
    norms = layout == "timm"
    network = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict() for _ in layers)})
    for block in network["blocks"]:
        block["attn"] = va.Attention2d(8, 2, qk_norm=norms, qkv_bias=layout != "diffusers")
    report = va.load_checkpoint(network, tmp_path / "out.safetensors", strict=False)
    assert not report.missing
    assert not report.differing
    assert list(report.unexpected) == ["stem.weight"]
    x = torch.randn(2, 8, 3, 4)
    for layer, block in zip(layers, network["blocks"], strict=True):
        if norms:
            block["attn"].q_norm.eps, block["attn"].k_norm.eps = layer.q_norm.eps, layer.k_norm.eps
        torch.testing.assert_close(block["attn"].eval()(x), run(layer.eval(), x), rtol=1e-5, atol=1e-5)
    if not norms:
        network["blocks"][0]["attn"] = va.Attention2d(8, 4, qkv_bias=layout != "diffusers")
        report = va.load_checkpoint(network, tmp_path / "out.safetensors", strict=False)
        assert report.differing == ("blocks.0.attn has num_heads=2 in the file and 4 in the model",)


def test_what_a_file_does_not_hold_is_an_error_of_its_kind(tmp_path, capsys):
    _, command = written(tmp_path, "torch-mha", **{"blocks.1.attn.bias_k": torch.ones(1, 1, 8)})
    for arguments, code, message in (
        (["--prefix", "blocks.*.attn"], 2, "num_heads must be given for torch-mha"),
        (["--num-heads", "2", "--prefix", "layer*"], 2, "matches no layer; the file has blocks, blocks.0"),
        (
            ["--num-heads", "2", "--prefix", "blocks.0"],
            1,
            "blocks.0 is no layer of torch-mha: it has no blocks.0.in_pr",
        ),
        (["--num-heads", "5", "--prefix", "blocks.0.attn"], 1, "its rows are no multiple of 5 heads"),
        (["--num-heads", "3", "--prefix", "blocks.0.attn"], 1, "its rows are no multiple of 3 heads"),  # of 8 channels
        (["--num-heads", "2", "--prefix", "blocks.1.attn"], 1, "has blocks.1.attn.bias_k, which a block"),
        (["--num-heads", "2", "--rank", "4"], 2, "rank must be the axes"),
    ):
        assert main([*command, *arguments]) == code, message
        assert message in capsys.readouterr().err
    command[1] = str(tmp_path / "none.pth")
    assert main([*command, "--num-heads", "2"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras, which saves
def test_weights_of_keras(keras, tmp_path):
    layer = keras.layers.MultiHeadAttention(2, 3, value_dim=4, use_gate=True)
    x = torch.randn(2, 3, 4, 6)
    query = keras.layers.Input((3, 4, 6))
    network = keras.Model(query, layer(query, query))
    network.save_weights(tmp_path / "net.weights.h5")
    tensors = convert.read_keras_weights(tmp_path / "net.weights.h5")
    (name,) = {key.split(".query_dense")[0] for key in tensors if ".query_dense.vars.0" in key}
    report = convert.convert_file(tmp_path / "net.weights.h5", tmp_path / "o.safetensors", "keras-mha", prefix=name)
    assert "qkv.weight" in str(report)
    with pytest.raises(convert.ConversionError, match="num_heads is 3, and its kernels have 2 heads"):
        convert.convert_file(
            tmp_path / "net.weights.h5", tmp_path / "w.safetensors", "keras-mha", prefix=name, num_heads=3
        )
    state = {key.removeprefix(f"{name}."): value for key, value in load_file(tmp_path / "o.safetensors").items()}
    block = va.Attention2d(6, 2, key_dim=3, value_dim=4, output_gate=True)
    block.load_state_dict(state)
    expected = layer(x, x).movedim(-1, 1)
    torch.testing.assert_close(block.eval()(x.movedim(-1, 1)), expected, rtol=1e-4, atol=1e-5)
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(OSError, match="file signature not found"):
        convert.read_keras_weights(tmp_path / "x.safetensors")


# --- the other way ----------------------------------------------------------------------------------------------------

PLAIN = {"qkv_bias": False, "proj_bias": False}
WIDE = {"key_dim": 3, "value_dim": 3, "proj_drop": 0.2}
THERE = {
    "torch": ("to_torch_mha", "from_torch_mha", [{"attn_drop": 0.1}, PLAIN]),
    "timm": ("to_timm_attention", "from_timm_attention", [{"attn_drop": 0.1, **WIDE}, {"qk_norm": True}, PLAIN]),
    "diffusers": ("to_diffusers_attention", "from_diffusers_attention", [WIDE, PLAIN]),
}


@pytest.mark.parametrize("library", THERE)
def test_there_and_back_is_the_same_block(library):
    there, back, variants = THERE[library]
    for options in variants:
        block = va.Attention2d(8, 2, **options).double().eval()
        block.qkv.weight.requires_grad_(False)
        again = getattr(convert, back)(getattr(convert, there)(block))
        assert again.unusual() == block.unusual()
        assert again.proj_drop.p == block.proj_drop.p
        assert again.state_dict().keys() == block.state_dict().keys()
        assert all(torch.equal(x, y) for x, y in zip(block.parameters(), again.parameters(), strict=True))
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in block.parameters()]
        x = torch.randn(2, 8, 3, 4, dtype=torch.float64)
        layer = getattr(convert, there)(block)
        torch.testing.assert_close(run(layer, x), block(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("there", "options", "name"),
    [
        ("to_torch_mha", {"key_dim": 3, "value_dim": 3}, "key_dim, value_dim"),
        ("to_torch_mha", {"qk_norm": True}, "qk_norm"),
        ("to_timm_attention", {"qk_norm": "cosine"}, "qk_norm='cosine'"),
        ("to_timm_attention", {"output_gate": True}, "output_gate"),
        ("to_timm_attention", {"value_dim": 3}, "value_dim"),
        ("to_timm_attention", {"pattern": "rows", "position": va.Rope2d()}, "pattern, position"),
        ("to_diffusers_attention", {"scale": 1.0}, "scale"),
        ("to_diffusers_attention", {"attn_drop": 0.5}, "attn_drop"),
    ],
)
def test_what_the_other_layer_does_not_do_is_refused(there, options, name):
    with pytest.raises(ValueError, match=f"block must not have its own {name}, of which"):
        getattr(convert, there)(va.Attention2d(8, 2, **options))
    with pytest.raises(ValueError, match="block must be an Attention1d"):
        getattr(convert, there)(nn.Linear(8, 8))


def test_a_wrong_way_back_is_found_out(monkeypatch):
    from vision_attn.networks.convert import to_layers

    names = to_layers.tensors_of
    monkeypatch.setattr(to_layers, "tensors_of", lambda *a: {key: x.flip(0) for key, x in names(*a).items()})
    for there in ("to_torch_mha", "to_timm_attention", "to_diffusers_attention"):
        with pytest.raises(convert.ConversionError, match="does not compute what it does"):
            partial(getattr(convert, there), va.Attention2d(8, 2))()
