"""[precision] attention: the chosen kernel runs, or is refused before the first step."""

import functools
import inspect
import sys

import pytest
import torch
from tiny import assert_same_gradients, inputs_of, randomize, tiny_config
from torch.profiler import profile

from titan_dit.config.layout import ActivationCheckpointConfig, CompileConfig
from titan_dit.config.section import UserError
from titan_dit.kernels import attention
from titan_dit.kernels.attention_choice import AttentionShape
from titan_dit.parallel import remat
from titan_dit.parallel.compile import compile_blocks

CPU = torch.device("cpu")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def shape(dtype=torch.float32, device=CPU, **values):
    return AttentionShape(heads=4, tokens=16, head_dim=8, dtype=dtype, device=device, **values)


def gradients(key, mode="none", compiled=False):
    """Gradients of a model with an attention key, and the operators that ran."""
    config = tiny_config().model
    model = config.build(1)
    randomize(dict(model.named_parameters()))
    attention.apply(model, attention.attend_by(key))
    remat.apply(model, ActivationCheckpointConfig(mode=mode))
    compile_blocks(model, CompileConfig(enabled=compiled))
    with profile() as trace:
        model(inputs_of(config), config.static(CPU)).square().sum().backward()
    ran = {event.key for event in trace.key_averages()}
    return {name: p.grad for name, p in model.named_parameters()}, ran


@pytest.mark.parametrize("mode", ["none", "attention", "selective", "full"])
def test_the_kernel_that_is_asked_for_runs_and_no_other(mode):
    expected, ran = gradients("auto")
    assert FLASH in ran
    for key in ("flash", "math"):
        found, ran = gradients(key, mode)
        assert (FLASH in ran, "aten::bmm" in ran) == (key == "flash", key == "math")
        assert_same_gradients(found, expected)


def written_out(q, k, v):
    return (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v


def test_the_compiler_does_not_put_flash_in_the_place_of_math():
    import torch._inductor.config as inductor
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def layer(x, weight, attend):
        # As `layers.Attention`, whose shape checks cannot be compiled.
        split = torch.nn.functional.linear(x, weight).unflatten(-1, (4, 3, 8)).unbind(3)
        return attend(*(part.transpose(1, 2) for part in split)).transpose(1, 2).flatten(2)

    graphs = []

    def keep(graph, inputs, **_):
        """Replaces the code generator: records the graph and runs it eagerly."""
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return compile_fx(graph, inputs, inner_compile=keep)

    def ran(attend):
        graphs.clear()
        with inductor.patch({"cpp.vec_isa_ok": True, "compile_threads": 1}):  # No probes, no pool.
            out = torch.compile(layer, fullgraph=True, backend=backend)(x, weight, attend)
        found = torch.autograd.grad(out.sum(), weight)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return {str(node.target) for graph in graphs for node in graph.graph.nodes}

    x, weight = torch.randn(2, 16, 32), (torch.randn(96, 32) / 6).requires_grad_()
    expected = torch.autograd.grad(layer(x, weight, attention.attend_by("flash")).sum(), weight)
    assert not any("scaled_dot_product" in name for name in ran(attention.attend_by("math")))
    # The compiler's own passes: plain matmuls are replaced by flash.
    assert any("scaled_dot_product" in name for name in ran(written_out))


def test_a_backend_is_a_part_of_what_is_compiled(monkeypatch):
    """On a CPU compilation must fail with the refusal of the chosen backend."""
    # AttentionShape checks cannot be compiled.
    monkeypatch.setattr(attention.layers, "attend", inspect.unwrap(attention.layers.attend))
    q = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(attention.attend_by("efficient"), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="backend"):
        compiled(q, q, q)


def test_the_choice_ends_with_the_call():
    attention.attend_by("flash")(*[torch.randn(1, 2, 16, 8)] * 3)
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("key", ["auto", "flash", "math"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ring", [False, True])
def test_a_cpu_runs_flash_and_math(key, dtype, ring):
    attention.check_runs(key, shape(dtype, ring=ring))
    assert attention.refusal(key, shape(dtype, ring=ring)) is None


@pytest.mark.parametrize("key", ["efficient", "cudnn", "flash3", "flash4"])
@pytest.mark.parametrize("ring", [False, True])
def test_a_cpu_refuses_the_others_and_says_what_would_do(key, ring):
    message = (
        rf'\[precision\] attention="{key}" cannot run 4 heads of 8 channels in float32 on cpu.*: '
        r'a CPU has flash and math only\. Set attention = "auto", or .*: "flash", "math"\.$'
    )
    with pytest.raises(UserError, match=message):
        attention.check_runs(key, shape(ring=ring))


def test_torch_s_reason_is_told_without_those_of_what_is_switched_off():
    said = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:9.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at x:1.)",
        "Flash attention kernel not used because: (Triggered internally at x:1.)",
        "Expected query, key and value to all be of dtype: {Half, BFloat16}. (Triggered internally",
    ]
    reason = attention.reason_of(said, "No available kernel. Aborting execution.")
    assert reason == "Expected query, key and value to all be of dtype: {Half, BFloat16}"
    assert attention.reason_of([], "No kernel.\nC++ frames") == "No kernel"


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(RuntimeError, match="it needs the module flash_attn_interface"):
        attention.use_implementation("flash3")
    monkeypatch.delattr(attention.implementations, "list_flash_attention_impls")
    with pytest.raises(RuntimeError, match="does not support it"):
        attention.use_implementation("flash4")
    attention.use_implementation("flash")


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 264])
def test_a_head_dim_of_flash_is_not_padded(head_dim):
    assert attention.padding("flash", head_dim, 1024, 0.1) is None


def masked_results(attend, dtype=torch.float64, **mask):
    """Output and gradients."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 3, 2, 16, 8, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = (x.requires_grad_() for x in drawn[:3].unbind(0))
    out = attend(q, k, v, **mask)
    return [x.double() for x in (out, *torch.autograd.grad(out, (q, k, v), drawn[3]))]


def by_a_softmax(q, k, v, causal=False, lengths=None):
    """Reference attention, written out."""
    place = torch.arange(16)
    seen = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    if causal:
        seen = (place[None] <= place[:, None])[None, None]
    if lengths is not None:
        seen = (place < lengths[:, None])[:, None, None]
    scores = (q @ k.mT / 8**0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


CAUSAL, LENGTHS = {"causal": True}, {"lengths": torch.tensor([1, 7, 16])}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key", "mask"),
    [("auto", CAUSAL), ("flash", CAUSAL), ("math", CAUSAL), ("auto", LENGTHS), ("math", LENGTHS)],
)
def test_masked_attention_is_the_softmax_over_what_is_seen(key, mask, dtype):
    expected = masked_results(by_a_softmax, **mask)
    found = masked_results(attention.attend_by(key), dtype, **mask)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for value, exact in zip(found, expected, strict=True):
        assert (value - exact).abs().max() <= tolerance * exact.abs().max()
    # Masked keys have no gradient.
    if "lengths" in mask:
        assert found[2][0, :, 1:].abs().max() == found[3][0, :, 1:].abs().max() == 0


@pytest.mark.parametrize("key", ["auto", "flash", "math"])
@pytest.mark.parametrize("mask", ["causal", "lengths"])
def test_a_kernel_that_is_asked_for_has_the_mask_or_is_refused(key, mask):
    given = CAUSAL if mask == "causal" else LENGTHS
    if attention.refusal(key, shape(mask=mask)) is None:
        attention.check_runs(key, shape(mask=mask))
        found = masked_results(attention.attend_by(key), **given)
        for value, exact in zip(found, masked_results(by_a_softmax, **given), strict=True):
            torch.testing.assert_close(value, exact)
    else:
        assert (key, mask) == ("flash", "lengths")
        with pytest.raises(UserError, match=r"masked by lengths, in float32 on cpu: .*\"math\""):
            attention.check_runs(key, shape(mask=mask))


def test_a_ring_has_kernels_for_a_causal_mask_and_none_for_lengths():
    for key in ("flash", "math"):
        assert attention.refusal(key, shape(mask="causal", ring=True)) is None
        reason = attention.refusal(key, shape(mask="lengths", ring=True))
        assert reason == attention.NO_LENGTHS


@pytest.mark.parametrize("key", ["auto", "flash", "math"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mask", [{}, CAUSAL, LENGTHS], ids=["none", "causal", "lengths"])
def test_grouped_queries_share_keys_and_values(key, groups, mask):
    if key == "flash" and mask is LENGTHS:
        pytest.skip("flash has no mask by lengths")
    q, k, v = torch.randn(3, 3, 4, 16, 8, dtype=torch.float64).unbind(0)
    k, v = k[:, :groups], v[:, :groups]
    head = torch.arange(4) // (4 // groups)
    found = attention.attend_by(key)(q, k, v, **mask)
    torch.testing.assert_close(found, by_a_softmax(q, k[:, head], v[:, head], **mask))


@pytest.mark.parametrize("mask", [CAUSAL, LENGTHS], ids=["causal", "lengths"])
def test_attention_that_is_recomputed_keeps_its_mask(mask):
    attend = functools.partial(remat.recomputed, attention.attend_by("auto"))
    for value, exact in zip(
        masked_results(attend, **mask), masked_results(by_a_softmax, **mask), strict=True
    ):
        torch.testing.assert_close(value, exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("key", attention.KEYS)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("ring", [False, True])
def test_a_gpu_kernel_is_right_or_refused_with_a_reason(key, head_dim, ring):
    on_gpu = AttentionShape(4, 256, head_dim, torch.bfloat16, torch.device("cuda"), ring)
    reason = attention.refusal(key, on_gpu)
    if reason is None and not ring:
        q, k, v = (torch.randn(2, 4, 256, head_dim, device="cuda").bfloat16() for _ in range(3))
        exact = attention.by_products(q.float(), k.float(), v.float())
        found = attention.attend_by(key)(q, k, v)
        torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2)
    elif reason is not None:
        assert reason
        with pytest.raises(UserError, match=f'attention="{key}"'):
            attention.check_runs(key, on_gpu)
    attention.use_implementation("auto")
    if key in ("flash", "efficient", "math"):
        assert reason is None
