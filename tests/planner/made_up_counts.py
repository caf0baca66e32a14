"""Counts by formula, for searches without a rehearsal: a block of two products and attention."""

from titan_dit.planner.work import AttentionCall, Counts, Message, Part, Product, Work

AGAIN = {"none": 0.0, "attention": 0.1, "selective": 0.3, "full": 1.0}
"""[activation_checkpoint] mode -> share of forward that backward repeats."""
KEPT = {"none": 40.0, "attention": 38.0, "selective": 20.0, "full": 2.0}
"""[activation_checkpoint] mode -> bytes per token and channel."""
NOTHING = Work()


def counts_of(plan):
    """Counts of a plan; `hidden` is that of its heads."""
    spec, sizes, size = plan.spec, plan.sizes, plan.microbatch_size
    hidden, tokens = spec.num_heads * spec.head_dim, size * spec.num_tokens / sizes.cp
    own = hidden / sizes.tp
    dtype = "bf16" if plan.precision.float8 == "off" else "float8"
    ring = sizes.cp if sizes.cp > 1 and plan.parallel.cp_method == "ring" else 1
    heads = spec.num_heads / sizes.tp / (sizes.cp if ring == 1 else 1)

    def passed(times, *, backward):
        products = {
            Product(1, tokens, 8 * own, hidden, dtype): times,
            Product(1, tokens, hidden, 4 * own, dtype): times,
        }
        queries = spec.num_tokens / (ring if ring > 1 else 1)
        kernel = AttentionCall(
            *(size, heads, queries, spec.num_tokens, spec.head_dim, "bf16", False, backward, ring),
            4 * size * queries * own if ring > 1 else 0,
        )
        messages = {}
        if sizes.tp > 1:
            sent = 2 * (sizes.tp - 1) / sizes.tp * tokens * hidden
            messages[Message("tp", "all-gather", sent)] = 2 * times
        if sizes.cp > 1 and ring == 1:
            messages[Message("cp", "all-to-all", 8 * tokens * own)] = times
        moved = 40 * times * tokens * own * (2 if dtype == "float8" else 1)
        return Work(
            products=products,
            attention={kernel: times / 2 if backward else times},
            messages=messages,
            moved=moved,
            fused=moved,
            operators=30 * times,
            kernels=10 * times,
        )

    mode = plan.activation_checkpoint.mode
    parameters = 12 * hidden * hidden / sizes.tp
    block = Part(
        forward=passed(1.0, backward=False),
        backward=passed(2.0, backward=True) + passed(AGAIN[mode], backward=False),
        update=Work(moved=60 * parameters, fused=60 * parameters, operators=20, kernels=20),
        parameters=parameters,
        trained=parameters,
        buffers=0.0,
        kept=KEPT[mode] * tokens * own,
        forward_peak=8 * tokens * own,
        backward_peak=16 * tokens * own,
        backward_gradients=0.0,
        tensors=8,
    )
    end = Part(
        forward=Work(moved=8 * tokens * own, operators=3, kernels=3),
        backward=Work(moved=16 * tokens * own, operators=6, kernels=6),
        update=NOTHING,
        parameters=64 * hidden / sizes.tp,
        trained=64 * hidden / sizes.tp,
        buffers=0.0,
        kept=2 * tokens * own,
        forward_peak=0.0,
        backward_peak=0.0,
        backward_gradients=0.0,
        tensors=2,
    )
    return Counts(
        embed=end,
        blocks={"": block},
        head=end,
        prepare=NOTHING,
        inputs=64.0 * spec.num_tokens,
        static=0.0,
        stream=2 * tokens * hidden,
        tied=0.0,
    )
