"""Attention into a timm model, and out again: nothing changes until it is trained."""

import timm
import torch

import vision_attn as va

model = timm.create_model("resnet18", num_classes=10).eval()  # pretrained=True for one that has learned something
images = torch.randn(2, 3, 224, 224)
before = model(images)

print(va.insert_(model, stages=[-2, -1]))  # where, and what it costs
assert torch.equal(model(images), before)  # the same output, bit for bit

gates = [block.gate for block in va.inserted(model).values()]
model(images).square().sum().backward()
print("gradients reach the gates:", all(gate.grad.abs().max() > 0 for gate in gates))

with va.use_impl(model, "einx"), va.capture(model, queries=[(112, 112)]) as maps:
    model(images)
for path, attention in maps.items():
    print(path, tuple(attention.weights.shape))  # images, heads, queries, rows and columns of the map

va.remove_(model)
assert torch.equal(model(images), before)
