"""Seconds of products, attention and moved bytes, against sums done by hand."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from hand_made import EASY, easy

from titan_dit.config.section import UserError
from titan_dit.dry_run.traffic import ring_backward, ring_forward
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.parallel.ring_attention import travel_backward, travel_forward
from titan_dit.planner.hardware import device_of, names
from titan_dit.planner.links import Network
from titan_dit.planner.rates import attention_s, moved_s, product_s, seconds, shape_factor
from titan_dit.planner.work import AttentionCall, Message, Product, Work

ALONE = Network(AxisSizes(), EASY)
SIDES = (1, 16, 64, 72, 128, 500, 1024, 4096, 50304)


def product(m, n, k, batch=1, dtype="bf16"):
    return Product(batch, m, n, k, dtype)


def attention(head_dim=128, tokens=2**20, **changes):
    given = dict(
        batch=1, heads=1, queries=tokens, keys=tokens, head_dim=head_dim, dtype="bf16",
        is_causal=False, is_backward=False,
    )  # fmt: skip
    return AttentionCall(**{**given, **changes})


def test_a_large_product_takes_its_flops_over_the_peak():
    # 2 x 9600^3 FLOPs at 100 TFLOP/s, 1% more for the shortest side.
    assert product_s(product(9600, 9600, 9600), EASY) == pytest.approx(1.01 * 2 * 9600**3 / 1e14)
    half = easy(products=0.5)
    assert product_s(product(9600, 9600, 9600), half) == pytest.approx(1.01 * 4 * 9600**3 / 1e14)


def test_a_short_side_halves_the_rate():
    assert shape_factor(96, 4096, 4096) == shape_factor(4096, 4096, 96) == 0.5
    assert product_s(product(9600, 9600, 96), EASY) == pytest.approx(2 * 2 * 9600**2 * 96 / 1e14)


def test_a_thin_product_takes_the_time_of_its_bytes():
    nbytes = 2 * (1 * 4096 + 4096 * 4096 + 1 * 4096)
    assert product_s(product(1, 4096, 4096), easy(moved=0.5)) == pytest.approx(nbytes / 5e11)
    fast = easy(peak_tflops={"fp32": 1e4})
    assert product_s(product(1, 4096, 4096, dtype="fp32"), fast) == pytest.approx(2 * nbytes / 1e12)


def test_float8_is_read_as_one_byte_and_written_as_two():
    device = easy(peak_tflops={"float8": 200.0})
    nbytes = 4096 + 4096 * 4096 + 2 * 4096
    assert product_s(product(1, 4096, 4096, dtype="float8"), device) == pytest.approx(nbytes / 1e12)


def test_a_batch_is_as_many_products():
    one = product_s(product(2048, 2048, 64), EASY)
    assert product_s(product(2048, 2048, 64, batch=24), EASY) == pytest.approx(24 * one)


@pytest.mark.parametrize("name", [name for name in names() if name != "cpu"])
def test_no_product_beats_the_peak_or_the_copy_rate(name):
    device = device_of(name)
    for m, n, k in itertools.product(SIDES, repeat=3):
        took = product_s(product(m, n, k, dtype="fp16"), device)
        assert took * device.peak("fp16") >= 2 * m * n * k
        assert took * 1e9 * device.copy_gb_per_s >= 2 * (m * n + m * k + n * k)


def test_a_larger_product_takes_no_less_time():
    for sides in itertools.product(SIDES[:-1], repeat=3):
        took = product_s(product(*sides), EASY)
        for dim in range(3):
            longer = list(sides)
            longer[dim] = SIDES[SIDES.index(sides[dim]) + 1]
            assert product_s(product(*longer), EASY) >= took


def test_long_attention_takes_its_flops_over_the_peak():
    whole = 4 * 2**40 * 128 / 1e14
    assert attention_s(attention(), EASY, ALONE) == pytest.approx(whole, rel=2e-4)
    causal = attention_s(attention(is_causal=True), EASY, ALONE)
    assert causal == pytest.approx(whole / 2, rel=1e-3)
    # Five products for two, at 0.85 of the rate.
    backward = attention_s(attention(is_backward=True), EASY, ALONE)
    assert backward == pytest.approx(2.5 * whole / 0.85, rel=4e-4)
    assert attention_s(attention(), easy(attention=0.5), ALONE) == pytest.approx(
        2 * whole, rel=2e-4
    )


def test_small_head_dims_reach_less():
    rate = {
        dim: attention(dim).flops / attention_s(attention(dim), EASY, ALONE)
        for dim in (32, 64, 72, 80, 96, 128, 256)
    }
    assert rate[64] / rate[128] == pytest.approx(5 / 6)
    # 72 and 80 are computed as 96.
    assert rate[72] / rate[96] == pytest.approx(72 / 96)
    assert rate[32] < rate[72] < rate[80] < rate[64] < rate[96] < rate[128] == rate[256]


@pytest.mark.parametrize("is_backward", [False, True])
def test_cudnn_computes_head_dims_between_64_and_128_as_128(is_backward):
    def took(dim, step):
        one = attention(dim, is_backward=is_backward)
        return attention_s(one, replace(EASY, head_step=step), ALONE)

    assert took(72, 64) == pytest.approx(took(128, 64)) == pytest.approx(took(96, 64))
    assert took(72, 32) == pytest.approx(took(96, 32))
    assert took(96, 32) < took(128, 32)
    assert took(64, 64) == took(64, 32)
    assert {name for name in names() if device_of(name).head_step == 64} == HOPPER | {"b200"}


HOPPER = {"h100", "h20", "h200"}
"""Devices whose attention is cuDNN's, like b200's; see `kernels.attention_choice.order`."""


def test_few_tokens_reach_less_and_a_causal_mask_less_again():
    def rate(tokens, **changes):
        # Many heads, as the bytes would bound a single one just as well.
        one = attention(tokens=tokens, **changes)
        return one.flops / attention_s(one, easy(copy_gb_per_s=1e9), ALONE)

    assert rate(128) / rate(2**20) == pytest.approx(0.5, rel=1e-3)
    tokens = (128, 256, 1024, 8192)
    rates = [rate(count) for count in tokens]
    assert rates == sorted(rates)
    # Backward loses two tiles at the ends, forward one.
    whole = rate(2**30, is_backward=True)
    assert rate(256, is_backward=True) / whole == pytest.approx(0.5, rel=1e-3)
    assert all(rate(count, is_causal=True) < rate(count) for count in tokens)


def test_short_attention_takes_the_time_of_its_bytes():
    # Two keys; q, o, k and v. Backward reads and writes as much again for each.
    fast, one = easy(peak_tflops={"bf16": 1e4}), attention(queries=4096, keys=2, heads=8)
    took = 2 * 8 * 2 * (4096 + 2) * 128 / 1e12
    assert attention_s(one, fast, ALONE) == pytest.approx(took)
    assert attention_s(one._replace(is_backward=True), fast, ALONE) == pytest.approx(2 * took)


def test_a_ring_sends_while_it_computes():
    links = Network(AxisSizes(cp=4, tp=8), EASY)
    whole = attention(tokens=2**16)
    ring = attention(queries=2**14, keys=2**16, ring=4)
    block = attention_s(attention(tokens=2**14), EASY, links)
    assert attention_s(ring, EASY, links) == pytest.approx(4 * block)
    assert ring.flops == whole.flops / 4
    # Behind an eighth of the NIC a hop takes 8/10 s for 1e9 bytes: three blocks wait for theirs.
    late = attention_s(ring._replace(hop_bytes=1e9), EASY, links)
    assert late == pytest.approx(block + 3 * 0.8)
    early = attention_s(ring._replace(hop_bytes=1e3), EASY, links)
    assert early == pytest.approx(4 * block)


class Clock:
    """Ranks of a ring that do the same at the same time: computing, and a link beside it.

    It is the `Peers` and the `Kernel` of `parallel.ring_attention`.
    """

    def __init__(self, size, block, links):
        self.size, self.rank, self.block, self.links = size, size - 1, block, links
        self.now = self.link = 0.0
        self.sent, self.arrivals = [], {}

    def send(self, message):
        self.sent.append(message.nbytes)
        self.link = max(self.link, self.now) + self.links.hop_s(message.nbytes, "cp")
        incoming = message.clone()
        self.arrivals[incoming.data_ptr()] = self.link
        return incoming

    def arrive(self, incoming):
        self.now = max(self.now, self.arrivals[incoming.data_ptr()])
        return incoming

    def forward(self, q, k, v, scale, causal):
        self.now += self.block
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(self, d_out, q, k, v, out, lse, scale, causal):
        self.now += self.block
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_ring_takes_what_its_code_takes_on_a_clock(is_causal, is_backward, dtype):
    """Also sends what the dry run counts."""
    q, k = torch.zeros(1, 2, 8, 4, dtype=dtype), torch.zeros(1, 1, 8, 4, dtype=dtype)
    lse = torch.zeros(1, 2, 8)
    # The time in which the keys are sent, in blocks: from all hidden to none.
    for size, keys in itertools.product((2, 3, 4, 7), (0.1, 0.3, 0.45, 0.7, 1.5)):
        one = attention(
            heads=2, queries=8, keys=8 * size, head_dim=4, ring=size,
            is_causal=is_causal, is_backward=is_backward,
            dtype={torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype],
        )  # fmt: skip
        block = attention_s(one._replace(ring=1, keys=8, queries=8), EASY, ALONE)
        slow = easy(inner_gb_per_s={2: 2 * k.nbytes / (1e9 * keys * block)})
        links = Network(AxisSizes(cp=size), slow)
        clock = Clock(size, block, links)
        if is_backward:
            travel_backward(q, q, k, k, q, lse, clock, clock, causal=is_causal)
            read = ring_backward([q, q, k, k], size)
        else:
            travel_forward(q, k, k, clock, clock, causal=is_causal)
            read = ring_forward([q, k, k], size)
        assert ("ring", sum(clock.sent)) == read
        one = one._replace(hop_bytes=sum(clock.sent) / (size - 1))
        assert attention_s(one, slow, links) == pytest.approx(clock.now), (size, keys)


def test_nothing_hides_the_last_gradients_of_a_ring():
    """bf16 keys, and gradients in fp32: a third and two thirds of the bytes."""
    links = Network(AxisSizes(cp=4, tp=8), EASY)  # 0.8 s for 1e9 bytes
    ring = attention(queries=2**14, keys=2**16, ring=4, is_backward=True)
    block = attention_s(ring._replace(queries=2**14, keys=2**14, ring=1), EASY, links)
    # Keys in a quarter of a block, gradients in a half: all hides but the last hop.
    hidden = attention_s(ring._replace(hop_bytes=0.75 * block / 0.8e-9), EASY, links)
    assert hidden == pytest.approx(4.5 * block)
    # Keys in 2 blocks, gradients in 4: keys, keys, both, gradients, gradients.
    late = attention_s(ring._replace(hop_bytes=6 * block / 0.8e-9), EASY, links)
    assert late == pytest.approx((2 + 2 + 6 + 4 + 4) * block)
    two = Network(AxisSizes(cp=2, tp=8), EASY)
    pair = attention(queries=2**14, keys=2**15, ring=2, is_backward=True)
    found = attention_s(pair._replace(hop_bytes=0.75 * block / 0.8e-9), EASY, two)
    assert found == pytest.approx(2.5 * block)


def test_bytes_are_moved_at_the_copy_rate():
    assert moved_s(1e12, EASY) == 1
    assert moved_s(1e12, easy(moved=0.8)) == pytest.approx(1.25)


WORK = Work(
    products={product(9600, 9600, 9600): 3},
    attention={attention(): 2},
    messages={
        Message("tp", "all-gather", 1e9): 4,
        Message("cp", "ring", 1e9): 3,
        Message("cp", "all-to-all", 1e9): 1,
        Message("all", "all-reduce", 1e9): 1,
    },
    moved=3e12,
    fused=1e12,
    operators=1e6,
    kernels=1e5,
)


def test_terms_are_those_of_their_operators():
    links = Network(AxisSizes(cp=2, tp=4), EASY)
    terms = seconds(WORK, EASY, links, fused=False)
    assert terms == pytest.approx(
        {
            "products": 3 * product_s(product(9600, 9600, 9600), EASY),
            "attention": 2 * attention_s(attention(), EASY, links),
            "elementwise": 3.0,
            "tp": 4 / 50,
            "cp": 1 / 50,
            "all": 1 / 100,
            "launches": 0.0,
        }
    )
    assert seconds(WORK, EASY, links, fused=True)["elementwise"] == 1.0


def test_launches_count_only_beyond_the_time_of_the_device():
    links = Network(AxisSizes(cp=2, tp=4), EASY)
    device_s = sum(seconds(WORK, EASY, links, fused=False).values())
    slow = seconds(WORK, easy(launch_us=100.0), links, fused=False)
    # A million operators of 100 us.
    assert sum(slow.values()) == pytest.approx(100)
    assert slow["launches"] == pytest.approx(100 - device_s)
    few = seconds(WORK, easy(launch_us=100.0), links, fused=True)
    assert few["launches"] == 0


def test_work_that_is_doubled_takes_twice_as_long():
    links = Network(AxisSizes(cp=2, tp=4), EASY)
    once = seconds(WORK, easy(launch_us=100.0), links, fused=False)
    twice = seconds(WORK.times(2), easy(launch_us=100.0), links, fused=False)
    assert twice == pytest.approx({key: 2 * value for key, value in once.items()})


def test_float8_needs_a_device_that_has_it():
    with pytest.raises(UserError, match=r"easy has no float8"):
        product_s(product(1024, 1024, 1024, dtype="float8"), EASY)


def test_rates_are_cheap():
    links = Network(AxisSizes(cp=2, tp=4), EASY)
    many = Work(products={product(1024, 1024, 64 + size): 1.0 for size in range(100)})
    seconds(many, EASY, links, fused=False)
    start = time.process_time()
    for _ in range(20):
        seconds(many, EASY, links, fused=False)
    # Of 2,000 cached products; 0.5 us each when measured, and 20 times that on a busy machine.
    assert time.process_time() - start < 2000 * 10e-6
