"""What people do with a network afterwards: copy, save, compile, export, distribute, average, halve. Five families."""

import copy
import io
import pickle
import warnings

import onnxruntime
import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from timm.utils import ModelEmaV3
from torch import nn

import vision_attn as va
from vision_attn.insertion import inserted_keys

FAMILIES = {
    "torchvision resnet18": lambda **options: torchvision.models.resnet18(num_classes=5),
    "convnext_atto": lambda **options: timm.create_model("convnext_atto", num_classes=5, **options),
    "mobilenetv3_small_050": lambda **options: timm.create_model("mobilenetv3_small_050", num_classes=5, **options),
    # whose stages loop over their children
    "regnetx_002": lambda **options: timm.create_model("regnetx_002", num_classes=5, **options),
    # whose maps are (b, h, w, c)
    "mambaout_femto": lambda **options: timm.create_model("mambaout_femto", num_classes=5, **options),
}
TIMM = [family for family in FAMILIES if not family.startswith("torchvision")]
SHAPE = (2, 3, 64, 64)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the map at"),
    pytest.mark.parametrize("family", FAMILIES),
]


def network(family, gate=0.5, **options):
    torch.manual_seed(0)
    model = FAMILIES[family](**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # some networks begin with branches or scales at zero
                parameter += 0.1 * torch.randn_like(parameter)
    va.insert_(model, stages=[-2, -1], gate_init=gate, num_heads=4, example_input=SHAPE)
    return model, torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def without_blocks(model):
    other = copy.deepcopy(model)
    va.remove_(other)
    return other


@pytest.fixture(autouse=True)
def only_torchs_own_warnings():
    with warnings.catch_warnings():
        # Of the compiler, the exporter and pickle, about themselves.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch|onnx")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch|onnx")
        yield


def test_blocks_take_effect_at_all(family):
    model, x = network(family)
    with torch.no_grad():
        assert not torch.allclose(model(x), without_blocks(model)(x), rtol=1e-3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_deepcopy_and_pickle(family, copied):
    model, x = network(family)
    with torch.no_grad():
        twin = copied(model)
        assert torch.equal(twin(x), model(x))
        for block in va.inserted(twin).values():
            nn.init.zeros_(block.gate)
        assert torch.equal(twin(x), without_blocks(model)(x))


def test_saving_whole_and_as_a_state_dict(family):
    model, x = network(family)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    whole = torch.load(file, weights_only=False)
    torch.manual_seed(7)
    other = FAMILIES[family]().eval()
    va.insert_(other, stages=[-2, -1], num_heads=4, example_input=SHAPE)
    other.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(whole(x), model(x))
        assert torch.equal(other(x), model(x))


def test_compile(family):
    model, x = network(family)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    found = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    expected = model(x)
    expected.sum().backward()
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-3, atol=1e-3 * float(parameter.grad.abs().max()))


def test_export_with_any_batch(family):
    model, x = network(family)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    for images in (x, torch.randn(5, 3, 64, 64)):
        with torch.no_grad():
            torch.testing.assert_close(program.module()(images), model(images), rtol=1e-4, atol=1e-4)


def test_onnx(family, tmp_path):
    model, x = network(family)
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, verbose=False, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-3, atol=1e-4)


def test_feature_extraction_by_fx(family):
    model, x = network(family)
    site = list(va.inserted(model))[-1]
    # timm knows which of its layers are not to be traced, and where they may be asserted away.
    fx = timm.models._features_fx if family in TIMM else torchvision.models.feature_extraction
    extractor = fx.create_feature_extractor(model, [site])
    seen = []
    model.get_submodule(site).register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(x)
        torch.testing.assert_close(extractor(x)[site], seen[0])


def test_features_only(family):
    if family not in TIMM:
        pytest.skip("features_only is timm's")
    model, x = network(family, features_only=True)
    with torch.no_grad():
        features = model(x)
        plain = without_blocks(model)(x)
    assert [map.shape for map in features] == [map.shape for map in plain]
    assert not torch.equal(features[-1], plain[-1])


def test_moving_average(family):
    model, x = network(family)
    ema = ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        for block in va.inserted(model).values():
            block.gate.fill_(1.5)
        ema.update(model)
        assert [float(block.gate.mean()) for block in va.inserted(ema.module).values()] == [1.0, 1.0]
        assert not torch.equal(ema.module(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(family, dtype):
    model, x = network(family, gate=0.0)
    model, x = model.to(dtype), x.to(dtype)
    with torch.no_grad():
        assert torch.equal(model(x), without_blocks(model)(x))
        for block in va.inserted(model).values():
            nn.init.ones_(block.gate)
        assert model(x).isfinite().all()
        assert model(x).dtype == dtype


def test_autocast(family):
    model, x = network(family, gate=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), without_blocks(model)(x))
        for block in va.inserted(model).values():
            nn.init.ones_(block.gate)
        model(x).float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_gradient_checkpointing(family):
    if family not in TIMM:
        pytest.skip("set_grad_checkpointing is timm's")
    model, x = network(family)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x).sum().backward()
        gradients.append([p.grad.clone() for block in va.inserted(model).values() for p in block.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert all(gradient.any() for gradient in gradients[1])


def work(rank, family, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, x = network(family)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(x[rank : rank + 1]).sum().backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    torch.save(gradients, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(family, tmp_path):
    mp.spawn(work, (family, str(tmp_path)), nprocs=2)
    model, x = network(family)
    (model(x).sum() / 2).backward()
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for key, parameter in model.named_parameters():
        assert torch.equal(one[key], other[key])
        torch.testing.assert_close(one[key], parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max()))
    assert all(one[key].any() for key in inserted_keys(model))


@pytest.mark.slow
def test_compile_to_machine_code(family):
    model, x = network(family)
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-3, atol=1e-3)
