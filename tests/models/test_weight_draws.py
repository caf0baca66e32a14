import math
import statistics

import pytest
import torch

from titan_dit.models import initializers
from titan_dit.models.weight_draws import BREAK, CENTRE, TAIL, normal, normal_quantile, uniform

WORD = 2**64 - 1
# The first outputs of SplitMix64 seeded with 1234567, as its authors' C code gives them.
KNOWN = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)
NORMAL = statistics.NormalDist()
KEY = 0x7F4A7C15_9E3779B9


def plain_uniform(key, element):
    """`uniform` of one element, in Python's integers."""
    word = (element + 1) * 0x9E3779B97F4A7C15 + key & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    upper = (word ^ word >> 31) >> 33
    return ((upper - (upper >> 30 << 31)) + 0.5) / 2**30


def plain_quantile(u):
    """`normal_quantile` in Python's floats: IEEE 754, and no libm but frexp."""

    def polynomial(coefficients, x):
        value = coefficients[0]
        for coefficient in coefficients[1:]:
            value = value * x + coefficient
        return value

    if abs(u) <= BREAK:
        q = u * 0.5
        r = q * q
        return polynomial(CENTRE[0], r) * q / polynomial(CENTRE[1], r)
    m, e = math.frexp((1 - abs(u)) * 0.5)
    m *= math.sqrt(2)
    z = (m - 1) / (m + 1)
    series = polynomial([1 / k for k in range(11, 0, -2)], z * z) * z * 2
    square = ((e - 0.5) * 0.6931471805599453 + series) * -2
    s = square * 0.11 + 1.9
    for _ in range(3):
        s = (square / s + s) * 0.5
    return polynomial(TAIL[0], s) / polynomial(TAIL[1], s) * (-1 if u > 0 else 1)


def kolmogorov(values, cdf):
    """sqrt(n) times the largest CDF distance; 1.95 has p = 0.001."""
    values = values.sort().values
    expected, steps = cdf(values), torch.arange(len(values) + 1) / len(values)
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    return math.sqrt(len(values)) * distance.item()


def test_the_random_bits_are_the_upper_ones_of_splitmix64():
    drawn = uniform(1234567, torch.arange(5)).mul(2**30).sub(0.5).tolist()
    assert [int(value) % 2**31 for value in drawn] == [word >> 33 for word in KNOWN]


@pytest.mark.parametrize("first", [0, 2**31 - 200, 2**40])
def test_every_bit_is_that_of_plain_python(first):
    elements = torch.arange(first, first + 400)
    plain = [plain_uniform(KEY, element) for element in elements.tolist()]
    assert uniform(KEY, elements).tolist() == plain
    assert uniform(KEY, elements, 0.3).tolist() == [u * 0.3 for u in plain]
    assert normal(KEY, elements, 0.02).tolist() == [plain_quantile(u) * 0.02 for u in plain]
    assert sum(abs(u) > BREAK for u in plain) > 10


def test_normals_are_the_quantiles_of_their_uniforms():
    # From the middle to the last of the 2**31 values.
    ends = [1 - 2.0**-k for k in range(1, 32)]
    u = torch.tensor([2.0**-31, *(k / 2000 for k in range(1, 2000)), *ends], dtype=torch.float64)
    exact = torch.tensor([-NORMAL.inv_cdf((1 - value) / 2) for value in u.tolist()], dtype=u.dtype)
    torch.testing.assert_close(normal_quantile(u), exact, rtol=1.2e-9, atol=0)
    assert torch.equal(normal_quantile(-u), -normal_quantile(u))


def test_drawn_values_have_their_distributions():
    elements = torch.arange(200_000)
    u, x = uniform(KEY, elements), normal(KEY, elements)
    assert kolmogorov(u, lambda value: (value + 1) / 2) < 1.95
    assert kolmogorov(x, lambda value: 0.5 * (1 + torch.erf(value / math.sqrt(2)))) < 1.95
    assert x.mean().abs() < 4 / math.sqrt(len(x))
    assert x.var().item() == pytest.approx(1, abs=4 * math.sqrt(2 / len(x)))
    assert x.pow(4).mean().item() == pytest.approx(3, abs=4 * math.sqrt(96 / len(x)))
    share = (x.abs() > 3).double().mean().item()
    assert share == pytest.approx(0.0026998, abs=4 * math.sqrt(0.0027 / len(x)))
    # Of neighbours, and of tensors whose keys differ in one bit.
    for other in (x.roll(1), normal(KEY ^ 1, elements)):
        assert torch.corrcoef(torch.stack((x, other)))[0, 1].abs() < 4 / math.sqrt(len(x))


@pytest.mark.parametrize(
    "initializer",
    [initializers.normal(0.02), initializers.xavier_uniform, initializers.ones, initializers.zeros],
)
def test_both_ways_draw_one_distribution(initializer):
    shape = torch.Size((300, 200))
    by_counter = initializer.values(shape, KEY, torch.arange(60_000))
    by_generator = initializer(shape, torch.Generator().manual_seed(0))
    assert by_generator.shape == shape
    assert by_counter.mean().item() == pytest.approx(by_generator.mean().item(), abs=8e-4)
    assert by_counter.std().item() == pytest.approx(by_generator.std().item(), rel=0.02)
