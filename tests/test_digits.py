"""The embedded data set asks what only information from both ends of the canvas can answer."""

import torch

from vision_attn.tools.training import digits
from vision_attn.tools.training.digits import CANVAS, DIGIT, PLAY, digit_pairs, draw_pairs


def digits_of_every_class():
    """One digit a class, each filled with its class plus one, so that a canvas tells what was drawn on it."""
    return (torch.arange(10, dtype=torch.uint8) + 1).view(10, 1, 1).expand(10, DIGIT, DIGIT), torch.arange(10)


def test_labels_say_whether_the_classes_are_the_same():
    images, labels = draw_pairs(*digits_of_every_class(), 2000, generator=torch.Generator().manual_seed(0))
    left, right = images[:, 0, :, : DIGIT + PLAY].amax((1, 2)), images[:, 0, :, -DIGIT - PLAY :].amax((1, 2))
    assert torch.equal(left == right, labels == 1)
    assert (images[:, 0, :, DIGIT + PLAY : -DIGIT - PLAY] == 0).all()
    assert ((images > 0).sum((1, 2, 3)) == 2 * DIGIT * DIGIT).all()


def test_one_digit_alone_says_nothing_about_the_answer():
    images, labels = draw_pairs(*digits_of_every_class(), 40_000, generator=torch.Generator().manual_seed(0))
    for side in (images[:, 0, :, : DIGIT + PLAY], images[:, 0, :, -DIGIT - PLAY :]):
        digit = side.amax((1, 2)).long() - 1
        same = torch.bincount(digit[labels == 1], minlength=10) / 20_000
        different = torch.bincount(digit[labels == 0], minlength=10) / 20_000
        torch.testing.assert_close(same, different, rtol=0, atol=0.01)
        torch.testing.assert_close(same, torch.full((10,), 0.1), rtol=0, atol=0.01)


def test_evaluation_digits_are_held_out(monkeypatch):
    monkeypatch.setattr(digits, "TRAIN_CANVASES", 10_000)
    train, evaluation = (digit_pairs(train=half)[0] for half in (True, False))
    assert train.shape[1:] == evaluation.shape[1:] == (1, *CANVAS)

    def drawn(images):
        return {tuple(image[0, :, :DIGIT].flatten().tolist()) for image in images if image[0, :, DIGIT].max() == 0}

    # Digits that begin at the left edge; a few of scikit-learn's are alike to the pixel, none of those here.
    assert len(drawn(evaluation)) > 100
    assert torch.equal(evaluation, digit_pairs(train=False)[0])
    assert not drawn(evaluation) & drawn(train)


def test_no_unit_before_a_block_sees_both_digits():
    import timm

    torch.manual_seed(0)
    network = timm.create_model("digit_pairs").eval()
    x = torch.rand(1, 1, *CANVAS, requires_grad=True)
    features = network.stage3(network.stage2(network.stage1(x)))
    (gradient,) = torch.autograd.grad(features[0, :, 0, 5].sum(), x)
    seen = torch.nonzero(gradient[0, 0].abs().sum(0)).flatten()
    assert int(seen.max() - seen.min()) + 1 <= 17
    assert CANVAS[1] - 2 * (DIGIT + PLAY) >= 17
