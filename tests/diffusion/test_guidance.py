import pytest
import torch

from titan_dit.diffusion.conditions import ClassLabels
from titan_dit.diffusion.guidance import Guidance, guided, scales


def guide(predict, labels, *settings):
    """Guided by class labels."""
    given = {"labels": labels}
    null = ClassLabels().null(len(labels), labels.device)
    return guided(predict, given, null, *settings)


def every(scale):
    """One scale for both elements of a token."""
    return torch.full((2,), float(scale))


class Predict:
    """A stub network that depends on x, t and label, and counts samples."""

    def __init__(self):
        self.rows = []

    def __call__(self, x, t, given):
        labels = given["labels"]
        self.rows.append(x.shape[0])
        return x * (labels[:, None, None] + 3) + t[:, None, None]


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0, 7.5])
def test_guidance_goes_from_unconditional_through_conditional(scale):
    predict, labels = Predict(), torch.tensor([0, 4, -1])
    x, t = torch.randn(3, 5, 2), torch.rand(3)
    velocity = guide(predict, labels, every(scale))(x, t)
    conditional = Predict()(x, t, {"labels": labels})
    unconditional = Predict()(x, t, {"labels": torch.tensor([-1, -1, -1])})
    expected = unconditional + scale * (conditional - unconditional)
    torch.testing.assert_close(velocity, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "rows"), [(1, 3), (1.0, 3), (2.0, 6), (0.0, 6)])
def test_guidance_takes_one_forward_pass_and_a_scale_of_one_half_of_it(scale, rows):
    predict = Predict()
    velocity = guide(predict, torch.tensor([0, 1, 2]), every(scale))
    for _ in range(2):
        velocity(torch.randn(3, 5, 2), torch.rand(3))
    assert predict.rows == [rows, rows]


def test_a_sample_does_not_depend_on_the_labels_of_the_others():
    x, t = torch.randn(3, 5, 2), torch.rand(3)
    a = guide(Predict(), torch.tensor([1, 2, 0]), every(3.0))(x, t)
    b = guide(Predict(), torch.tensor([1, 0, 2]), every(3.0))(x, t)
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])


def test_only_the_guided_channels_of_every_pixel_are_guided():
    """Two pixels of three channels and a learned variance; two channels guided."""
    found = scales(4.0, guided=2, outputs=6, pixels=2, device=torch.device("cpu"))
    assert found.tolist() == [4, 4, 1, 1, 1, 1] * 2
    conditional, unconditional = torch.randn(2, 1, 3, 12)

    def predict(x, t, given):
        return torch.cat((conditional, unconditional))

    got = guide(predict, torch.tensor([1]), found)(torch.zeros(1, 3, 6), torch.zeros(1))
    kept = found == 1
    assert torch.equal(got[..., kept], conditional[..., kept])
    expected = unconditional + 4 * (conditional - unconditional)
    torch.testing.assert_close(got[..., ~kept], expected[..., ~kept])


class Steady:
    """A prediction per label, with a std of 2 with a label and of 1 without."""

    def __call__(self, x, timestep, given):
        labels = given["labels"]
        base = torch.linspace(-1, 1, x[0].numel()).view(x.shape[1:])
        return torch.stack([base * (2 if label >= 0 else 1) + label for label in labels])


def test_guidance_outside_its_interval_is_none():
    labels, x = torch.tensor([1]), torch.zeros(1, 3, 2)
    inside = guide(Steady(), labels, every(3.0))(x, torch.tensor([500.0]))
    for timestep in (100.0, 300.0, 500.0, 700.0, 900.0):
        settings = Guidance(3.0, interval=(0.25, 0.75))
        predict = guide(Steady(), labels, every(3.0), settings, lambda t: t / 1000)
        found = predict(x, torch.tensor([timestep]))
        is_guided = 250 <= timestep <= 750
        assert torch.equal(found, inside if is_guided else Steady()(x, None, {"labels": labels})), (
            timestep
        )


def test_rescaled_guidance_has_the_std_of_the_prediction_with_the_label():
    labels, x, t = torch.tensor([1, 2]), torch.zeros(2, 3, 2), torch.zeros(2)
    plain = guide(Steady(), labels, every(3.0))(x, t)
    wanted = Steady()(x, None, {"labels": labels}).flatten(1).std(1)
    for share in (0.5, 1.0):
        found = guide(Steady(), labels, every(3.0), Guidance(3.0, rescale=share))(x, t)
        std = torch.lerp(plain.flatten(1).std(1), wanted, share)
        torch.testing.assert_close(found.flatten(1).std(1), std)
        # Only its length changes.
        ratio = found / plain
        torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))
    # An untrained network predicts 0.
    nothing = guide(lambda x, *_: x, labels, every(3.0), Guidance(3.0, rescale=1.0))(x, t)
    assert torch.equal(nothing, x)


def test_a_worse_network_guides_with_the_same_labels():
    labels, x, t = torch.tensor([1, 2]), torch.zeros(2, 3, 2), torch.zeros(2)
    asked = []

    def weak(x, timestep, given):
        asked.append(given["labels"])
        return torch.full_like(x, 0.5)

    found = guide(Steady(), labels, every(3.0), Guidance(3.0, weak=weak))(x, t)
    torch.testing.assert_close(found, 0.5 + 3 * (Steady()(x, t, {"labels": labels}) - 0.5))
    assert [labels.tolist() for labels in asked] == [[1, 2]]
