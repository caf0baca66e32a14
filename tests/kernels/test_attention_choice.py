"""The kernel that "auto" means, over a table of devices and shapes."""

import inspect
import math
from dataclasses import replace

import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.kernels import attention, attention_kernels
from titan_dit.kernels.attention_choice import AttentionShape, Hardware, hardware_of, harm, order
from titan_dit.kernels.attention_kernels import AttentionKernel

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TURING, AMPERE, ADA = (Hardware("cuda", x, 92600) for x in ((7, 5), (8, 0), (8, 9)))
H200, B200, B300 = (Hardware("cuda", x, 92600) for x in ((9, 0), (10, 0), (10, 3)))
RTX = Hardware("cuda", (12, 0), 92600)
OF_2_11 = replace(H200, cudnn=91900)
"""torch 2.11 comes with cuDNN 9.19."""
OLD = replace(H200, cudnn=91002)
UNWANTED = replace(H200, prefers_cudnn=False)
CPU, OTHER, UNKNOWN = Hardware("cpu"), Hardware("meta"), Hardware("cuda")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LIKE_TORCH = ("cudnn", "flash", "efficient", "math")
BY_FLASH = LIKE_TORCH[1:]
EFFICIENT = LIKE_TORCH[2:]


def shape(head_dim=72, tokens=1024, dtype=BF16, **values):
    return AttentionShape(16, tokens, head_dim, dtype, torch.device("cuda"), **values)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("hardware", "asked", "expected"),
    [
        (H200, shape(), LIKE_TORCH),
        (B200, shape(128), LIKE_TORCH),
        (B300, shape(64, dtype=FP16), LIKE_TORCH),
        # cuDNN is slower there than flash: torch does not prefer it either.
        *((hardware, shape(), BY_FLASH) for hardware in (AMPERE, ADA, RTX)),
        (TURING, shape(), ("math",)),
        (TURING, shape(64, dtype=FP16), EFFICIENT),
        (OLD, shape(), BY_FLASH),
        (UNWANTED, shape(), BY_FLASH),
        (UNKNOWN, shape(), ("math",)),
        # Head dims and dtypes.
        (H200, shape(136), BY_FLASH),
        (H200, shape(256), LIKE_TORCH),
        (B200, shape(256), LIKE_TORCH),
        *((OF_2_11, shape(wide), LIKE_TORCH) for wide in (136, 192, 256)),
        (OF_2_11, shape(264), EFFICIENT),
        (replace(B200, cudnn=91900), shape(136), BY_FLASH),
        (H200, shape(264), EFFICIENT),
        (ADA, shape(208), EFFICIENT),
        (ADA, shape(256), BY_FLASH),
        (H200, shape(dtype=FP32), EFFICIENT),
        (H200, shape(dtype=FP64), ("math",)),
        # Lengths: 576 and 64 are 64 modulo 128.
        (H200, shape(tokens=576), LIKE_TORCH),
        (OF_2_11, shape(tokens=576), BY_FLASH),
        (OF_2_11, shape(tokens=64), BY_FLASH),
        (OF_2_11, shape(tokens=1000), LIKE_TORCH),
        (replace(B200, cudnn=91900), shape(tokens=576), LIKE_TORCH),
        (H200, shape(tokens=1), BY_FLASH),
        (CPU, shape(), ("flash", "math")),
        (CPU, shape(dtype=FP64), ("flash", "math")),
        (OTHER, shape(), ("math",)),
    ],
)
def test_local_attention_and_the_ring_take_the_same_kernel(hardware, asked, expected, ring):
    assert order(replace(asked, ring=ring), hardware) == expected


def test_the_ring_pads_head_dims_that_a_local_kernel_refuses():
    assert order(shape(12), H200) == ("flash", "math")
    assert order(shape(12, ring=True), H200) == LIKE_TORCH


def test_a_mask_of_lengths_is_not_for_flash_and_a_causal_one_is_for_all():
    assert order(shape(mask="lengths"), H200) == ("cudnn", "efficient", "math")
    assert order(shape(mask="causal"), H200) == LIKE_TORCH
    # The tile that overflows is masked.
    assert order(shape(tokens=576, mask="causal"), OF_2_11) == LIKE_TORCH


def test_a_deterministic_run_has_no_cudnn():
    assert order(shape(), H200, deterministic=True) == BY_FLASH
    assert harm("cudnn", shape(), H200, True) == (
        "the gradients of cuDNN attention are not deterministic"
    )
    assert harm("flash", shape(), H200, True) is None


def test_an_unsafe_length_is_told_with_its_numbers():
    found = harm("cudnn", shape(tokens=576), OF_2_11)
    assert found == (
        "cuDNN 9.19 can give NaN gradients on Hopper for 576 keys, 64 modulo 128; 9.26 is right"
    )
    assert harm("cudnn", shape(tokens=576), H200) is None
    assert harm("cudnn", shape(tokens=640), OF_2_11) is None


@pytest.mark.parametrize(("tokens", "keys"), [(576, 576), (640, 320), (1152, 576), (1280, None)])
def test_a_causal_ring_is_refused_the_lengths_of_its_unmasked_blocks(tokens, keys):
    assert harm("cudnn", shape(tokens=tokens, mask="causal"), OF_2_11) is None
    found = harm("cudnn", shape(tokens=tokens, mask="causal", ring=True), OF_2_11)
    assert (found is None) if keys is None else f"for {keys} keys" in found


@pytest.mark.parametrize("ring", [False, True])
def test_a_harmful_kernel_is_refused_before_the_first_step(monkeypatch, ring):
    monkeypatch.setattr(attention, "hardware_of", lambda device: OF_2_11)
    asked = replace(shape(tokens=576, ring=ring), device=HERE)
    monkeypatch.setattr(attention, "KEYS", ("cudnn", "math"))
    with pytest.raises(UserError, match=r'attention="cudnn" cannot run .* can give NaN .*"math"'):
        attention.check_runs("cudnn", asked)


def test_auto_in_a_ring_is_the_first_kernel_that_runs(monkeypatch):
    refused, asked = {"cudnn"}, replace(shape(ring=True), device=HERE)
    monkeypatch.setattr(attention, "hardware_of", lambda device: H200)
    monkeypatch.setattr(
        attention, "refusal", lambda key, shape: f"no {key}" if key in refused else None
    )
    assert attention.settled("auto", asked) == "flash"
    assert attention.settled("efficient", asked) == "efficient"
    assert attention.settled("auto", replace(asked, ring=False)) == "auto"
    refused.update(LIKE_TORCH)
    with pytest.raises(UserError, match=r'"auto" cannot run .*: cudnn: no cudnn; flash: no fl.*ul'):
        attention.settled("auto", asked)


def test_local_attention_leaves_the_unsafe_lengths_to_other_kernels(monkeypatch):
    """The rule of `order` at the call: torch's own choice would be cuDNN before torch 2.15."""
    seen = []

    def attend(q, k, v, causal, lengths):
        seen.append((k.shape[2], causal, torch.backends.cuda.cudnn_sdp_enabled()))

    monkeypatch.setattr(attention.layers, "attend", attend)
    for tokens, causal in ((576, False), (576, True), (640, False)):
        q = torch.empty(1, 2, tokens, 8)
        attention.attend_finitely(q, q, q, causal)
    assert seen == [(576, False, False), (576, True, True), (640, False, True)]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(attention, "hardware_of", lambda device: OF_2_11)
    assert attention.attend_by("auto", "cuda") is attention.attend_finitely
    monkeypatch.setattr(attention, "hardware_of", lambda device: H200)
    assert attention.attend_by("auto", "cuda") is attend


def test_that_choice_is_a_part_of_what_is_compiled(monkeypatch):
    # Shape checks cannot be compiled.
    monkeypatch.setattr(attention.layers, "attend", inspect.unwrap(attention.layers.attend))
    compiled = torch.compile(attention.attend_finitely, backend="eager", fullgraph=True)
    for tokens in (64, 32):
        q = torch.randn(1, 2, tokens, 8)
        assert torch.equal(compiled(q, q, q), attention.layers.attend(q, q, q))
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_kernel_of_auto_is_the_one_that_torch_names():
    asked = replace(shape(8, 16, FP32), device=torch.device("cpu"))
    assert attention.kernel_of("auto", asked) == "flash"
    assert attention.kernel_of("auto", replace(asked, mask="lengths")) == "flash"
    assert attention.kernel_of("auto", replace(asked, ring=True)) == "flash"
    assert attention.kernel_of("cudnn", asked) == "cudnn"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 72, 128, 136, 256])
@pytest.mark.parametrize("tokens", [256, 576, 1000])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("mask", ["none", "causal", "lengths"])
def test_this_gpu_runs_the_kernel_that_the_table_names(head_dim, tokens, dtype, mask):
    asked = AttentionShape(4, tokens, head_dim, dtype, HERE, mask=mask)
    expected = order(asked, hardware_of(HERE))
    assert attention.kernel_of("auto", asked) in expected
    if head_dim <= 128:  # torch 2.15 has cuDNN for 256 as well.
        assert attention.kernel_of("auto", asked) == expected[0]
    ring = replace(asked, ring=True, mask="none" if mask == "lengths" else mask)
    assert attention.settled("auto", ring) == order(ring, hardware_of(HERE))[0]


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda out, lse: (out, lse / math.log(2)), "log-sum-exp"),
        (lambda out, lse: (out.roll(1, -1), lse), "output"),
    ],
)
def test_a_ring_takes_no_kernel_whose_results_are_wrong(fault, what, monkeypatch):
    shape = AttentionShape(2, 64, 16, BF16, torch.device("cpu"), ring=True)
    assert attention.settled("auto", shape) == "flash"
    right = attention_kernels.named("flash", torch.zeros(1))
    wrong = AttentionKernel(lambda *given: fault(*right.forward(*given)), right.backward)
    named = attention_kernels.named
    monkeypatch.setattr(
        attention, "named", lambda key, *of: wrong if key == "flash" else named(key, *of)
    )
    assert attention.refusal("flash", shape).startswith(f"its {what} differs from that of matmuls")
    assert attention.settled("auto", shape) == "math"


@pytest.mark.parametrize("of", [0, 1, 2])
def test_a_ring_takes_no_kernel_whose_gradients_are_wrong(of, monkeypatch):
    shape = AttentionShape(2, 64, 16, BF16, torch.device("cpu"), ring=True)
    right = attention_kernels.named("flash", torch.zeros(1))

    def backward(*given):
        found = list(right.backward(*given))
        found[of] = 1.1 * found[of]
        return found

    monkeypatch.setattr(attention, "named", lambda *_: AttentionKernel(right.forward, backward))
    assert f"its gradient of {'qkv'[of]} differs" in attention.refusal("flash", shape)
