"""Each section of docs/recipes.md runs in its own process, and is skipped by name where a package is missing."""

import re
from pathlib import Path

import pytest
from test_readme import ROOT, blocks, code_and_output, run_in_process, skip_if_missing, split_numbers

pytestmark = pytest.mark.slow

PARTS = [part.partition("\n") for part in (ROOT / "docs/recipes.md").read_text().split("\n## ")[1:]]
SECTIONS = {title: text for title, _, text in PARTS if blocks(text, "python")}

#: Code that runs before the first block of a section: files and processes that the reader is assumed to have.
BEFORE = {
    "Ultralytics YOLO": """
from pathlib import Path
import torch
from torchvision.utils import save_image
from ultralytics import YOLO
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import DEFAULT_CFG
torch.manual_seed(0)
DEFAULT_CFG.plots = False
for folder in ("images", "labels"):
    Path("squares", folder).mkdir(parents=True)
for i in range(12):
    picture, (x, y) = 0.3 * torch.rand(3, 160, 160), torch.randint(112, (2,)).tolist()
    picture[:, y : y + 48, x : x + 48] = 1
    save_image(picture, f"squares/images/{i}.png")
    Path(f"squares/labels/{i}.txt").write_text(f"0 {(x + 24) / 160} {(y + 24) / 160} 0.3 0.3")
Path("squares.yaml").write_text(f"path: {Path('squares').resolve()}\\ntrain: images\\nval: images\\nnames: [square]")
checkpoint = YOLO("yolov8n.yaml")
checkpoint.model = DetectionModel("yolov8n.yaml", nc=1, verbose=False)
checkpoint.save("yolov8n.pt")
""",
    "FSDP2 and DDP": "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
}

#: Code that runs after the last block of a section: checks of statements in its prose.
AFTER = {
    "Ultralytics YOLO": """
images, restored, started = torch.rand(2, 3, 160, 160), YOLO("yolov8n.pt").model.eval(), []
@torch.no_grad()
def remember(trainer):
    started.append(trainer.model.eval()(images)[0])
    trainer.model.train()
again = YOLO("yolov8n.pt")
again.add_callback("on_pretrain_routine_end", remember)
again.train(trainer=WithAttention, data="squares.yaml", epochs=1, imgsz=160, batch=4, workers=0)
assert torch.equal(started[0], restored(images)[0])  # all weights are transferred
trained = YOLO(again.trainer.best)
assert va.inserted_blocks(trained.model)["model.9"].attn.proj.weight.abs().max() > 0
before = trained.model.float().eval()(images)[0]
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("blocks").Reload()
assert {tag.split("/")[1] for tag in events.Tags()["scalars"]} == {"residual_ratio", "gate", "entropy"}
assert all(one.value > 0 for tag in events.Tags()["scalars"] for one in events.Scalars(tag))
trained.add_callback("on_pretrain_routine_end", remember)
trained.train(trainer=WithAttention, data="squares.yaml", epochs=1, imgsz=160, batch=4, workers=0)
assert torch.equal(started[1], before)
""",
    "torchvision": """
torch.nn.init.normal_(block.attn.proj.weight, std=0.02)
with torch.no_grad(), va.capture(detector.backbone) as maps:
    run(detector, images)
batch, _ = detector.transform(images)
weights = next(iter(maps.values())).weights
side = 1 + (batch.image_sizes[1][1] - 1) // 32
assert side < weights.shape[4] and weights[1, ..., side:].abs().max() == 0 and weights[1, ..., :side].min() > 0
with torch.no_grad():
    assert len(detections) == 2 and not torch.equal(run(detector, images)[1]["boxes"], detector(images)[1]["boxes"])
""",
    "transformers": """
with torch.no_grad(), va.padded(detr, mask.bool()), va.capture(detr) as maps:
    detr(pixel_values=pixels, pixel_mask=mask)
    weights = next(iter(maps.values())).weights
    assert weights[1, ..., 8:].abs().max() == 0 and weights[1, ..., :8].min() > 0
with torch.no_grad():
    assert not torch.equal(detr(pixels, pixel_mask=mask).logits, masked)
""",
    "OpenMMLab": """
from mmengine.model import BaseModule
from mmengine.runner import Runner
@MODELS.register_module()
class Backbone(BaseModule):
    def __init__(self):
        super().__init__(init_cfg=dict(type="Kaiming", layer="Conv2d"))
        layers = torch.nn.Conv2d(3, 32, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, 2)
        self.layers = torch.nn.Sequential(*layers)
    def forward(self, images):
        return self.layers(images)
def projection(model):
    return va.inserted_blocks(model.backbone)["layers.2"].attn.proj.weight
model = WithAttention(dict(type="Backbone"))
before = [p.clone() for p in model.backbone.layers.parameters()]
model.init_weights()
assert all(not torch.equal(p, old) for p, old in zip(model.backbone.layers[0].parameters(), before))
assert projection(model).abs().max() == 0
data = [dict(images=torch.randn(3, 64, 64), labels=i % 5) for i in range(8)]
loader = dict(batch_size=4, sampler=dict(type="DefaultSampler"), collate_fn=dict(type="default_collate"))
rates = dict(optimizer=dict(type="SGD", lr=0.01), paramwise_cfg=dict(custom_keys={"inserted": dict(lr_mult=5)}))
options = dict(train_cfg=dict(by_epoch=True, max_epochs=1), optim_wrapper=rates)
model_config = dict(type="WithAttention", backbone=dict(type="Backbone"))
runner = Runner(model_config, "work", dict(dataset=data, **loader), **options)
runner.train()
assert projection(runner.model).abs().max() > 0
assert {group["lr"] for group in runner.optim_wrapper.param_groups} == {0.01, 0.05}
va.load_checkpoint_(model, "work/epoch_1.pth")
assert torch.equal(projection(model), projection(runner.model))
""",
    "Lightning": """
restored = Classifier.load_from_checkpoint("last.ckpt").net.eval()
assert torch.equal(net.eval()(images := torch.rand(2, 3, 64, 64)), restored(images))
assert va.inserted_blocks(net)["layer4.1"].attn.proj.weight.abs().max() > 0
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
assert EventAccumulator(trainer.logger.log_dir).Reload().Tags()["images"] == ["layer4.1.inserted.attn"]
""",
    "fastai": "assert all(b.attn.proj.weight.abs().max() > 0 for b in va.inserted_blocks(learn.model).values())",
    "Hugging Face Trainer": """
loaded = ResNetForImageClassification.from_pretrained("run/checkpoint-2").eval()
va.load_adapter_(loaded, "run/checkpoint-2/blocks.safetensors")
assert torch.equal(loaded(images := torch.rand(2, 3, 64, 64)).logits, model.eval()(images).logits)
assert all(block.attn.proj.weight.abs().max() > 0 for block in va.inserted_blocks(model).values())
""",
    "PEFT": """
from peft import PeftModel
images = torch.rand(2, 3, 64, 64)
expected = tuned(images)
merged = tuned.merge_and_unload()
torch.testing.assert_close(merged(images), expected)
va.save_adapter(merged, "blocks.safetensors")
assert va.inserted_blocks(merged)["layer4.1"].attn.proj.weight.abs().max() > 0
""",
}


@pytest.mark.parametrize("title", [pytest.param(title, id=f"recipes.md: {title}") for title in SECTIONS])
def test_a_section_runs_and_prints_what_is_shown(title, tmp_path, monkeypatch, image_folder):
    skip_if_missing(SECTIONS[title])
    monkeypatch.chdir(tmp_path)
    Path("flowers").mkdir()  # the images of fastai
    for name, split in {"train": "train", "valid": "val"}.items():
        Path("flowers", name).symlink_to(image_folder / split)
    codes, outputs = zip(*code_and_output(SECTIONS[title]), strict=True)
    printed = run_in_process([BEFORE.get(title, ""), *codes, AFTER.get(title, "")])[1:-1]
    for lines, expected in zip(printed, outputs, strict=True):
        if expected:  # libraries print their own logs
            (words, numbers), (shown, shown_numbers) = split_numbers(lines), split_numbers(expected)
            assert words.endswith(shown)
            assert numbers[len(numbers) - len(shown_numbers) :] == pytest.approx(shown_numbers, rel=1e-3)


def test_the_table_lists_every_section():
    rows = re.findall(r"^\| \[([^\]]+)\]\((\S+)\) \|", (ROOT / "docs/recipes.md").read_text(), flags=re.MULTILINE)
    anchors = [target for _, target in rows if target.startswith("#")]
    titles = [*SECTIONS, "Other libraries"]
    assert anchors == ["#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
