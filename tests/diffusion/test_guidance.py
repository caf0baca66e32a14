import pytest
import torch

from titan_dit.diffusion.guidance import guided, scales


def every(scale):
    """One scale for both elements of a token."""
    return torch.full((2,), float(scale))


class Predict:
    """A stub network that depends on x, t and label, and counts samples."""

    def __init__(self):
        self.rows = []

    def __call__(self, x, t, labels):
        self.rows.append(x.shape[0])
        return x * (labels[:, None, None] + 3) + t[:, None, None]


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0, 7.5])
def test_guidance_goes_from_unconditional_through_conditional(scale):
    predict, labels = Predict(), torch.tensor([0, 4, -1])
    x, t = torch.randn(3, 5, 2), torch.rand(3)
    velocity = guided(predict, labels, every(scale))(x, t)
    conditional = Predict()(x, t, labels)
    unconditional = Predict()(x, t, torch.tensor([-1, -1, -1]))
    expected = unconditional + scale * (conditional - unconditional)
    torch.testing.assert_close(velocity, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "rows"), [(1, 3), (1.0, 3), (2.0, 6), (0.0, 6)])
def test_guidance_takes_one_forward_pass_and_a_scale_of_one_half_of_it(scale, rows):
    predict = Predict()
    velocity = guided(predict, torch.tensor([0, 1, 2]), every(scale))
    for _ in range(2):
        velocity(torch.randn(3, 5, 2), torch.rand(3))
    assert predict.rows == [rows, rows]


def test_a_sample_does_not_depend_on_the_labels_of_the_others():
    x, t = torch.randn(3, 5, 2), torch.rand(3)
    a = guided(Predict(), torch.tensor([1, 2, 0]), every(3.0))(x, t)
    b = guided(Predict(), torch.tensor([1, 0, 2]), every(3.0))(x, t)
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])


def test_only_the_guided_channels_of_every_pixel_are_guided():
    """Two pixels of three channels and a learned variance; two channels guided."""
    found = scales(4.0, guided=2, outputs=6, pixels=2, device=torch.device("cpu"))
    assert found.tolist() == [4, 4, 1, 1, 1, 1] * 2
    conditional, unconditional = torch.randn(2, 1, 3, 12)

    def predict(x, t, labels):
        return torch.cat((conditional, unconditional))

    got = guided(predict, torch.tensor([1]), found)(torch.zeros(1, 3, 6), torch.zeros(1))
    kept = found == 1
    assert torch.equal(got[..., kept], conditional[..., kept])
    expected = unconditional + 4 * (conditional - unconditional)
    torch.testing.assert_close(got[..., ~kept], expected[..., ~kept])
