"""Time of a training step of a GPT: `OMP_NUM_THREADS=1 python benchmarks/gpt_step.py [...]`.

Against a plain GPT-2 and, if transformers can be imported, its GPT2LMHeadModel. One process, fp32.
Steps run in turn, see benchmarks/step.py; ratios are medians over turns.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping

import plain_gpt
import torch
from report import finish
from step import measure, table
from torch import Tensor

from titan_dit.data.base import Batch
from titan_dit.data.token_windows import TokenFacts
from titan_dit.execution import LocalExecutor, Output
from titan_dit.kernels import cross_entropy, linear
from titan_dit.models.gpt_config import GPTConfig
from titan_dit.objectives.sections import NextTokenConfig
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.optim.sections import AdamWConfig
from titan_dit.parallel.init import initialize
from titan_dit.ranks import process_group
from titan_dit.rng import SampleRNG

MakeStep = Callable[[GPTConfig, Tensor], Callable[[], Tensor]]


def ours(config: GPTConfig, windows: Tensor) -> Callable[[], Tensor]:
    """titan_dit's step, as its trainer builds it for one process."""
    facts = TokenFacts(
        count=1, sequence_length=config.sequence_length, vocabulary=config.vocab_size
    )
    objective = NextTokenConfig().build(config, facts)
    with torch.device("meta"):
        model = config.spec().build()
    initialize(model, model.initializers(), 0, windows.device)
    cross_entropy.apply(model)
    if windows.device.type == "cpu":
        linear.apply(model)

    def loss_of(output: Output, targets: Mapping[str, Tensor]) -> Tensor:
        assert isinstance(output, Tensor)
        return objective.loss({"cross_entropy": output}, targets)

    executor = LocalExecutor(model, loss_of, None)
    optimizer = build_optimizer(dict(model.named_parameters()), AdamWConfig(), config.spec())
    batch, device = len(windows), windows.device
    data = Batch(
        fields={"tokens": windows},
        sample_numbers=torch.arange(batch, device=device),
        weight=torch.ones(batch, device=device),
        total_weight=float(batch),
    )
    never = torch.zeros((), dtype=torch.bool, device=device)

    def step() -> Tensor:
        loss = executor.step(objective.prepare(data, SampleRNG(0, data.sample_numbers)))
        apply_gradients(optimizer, 1e-4, skip=never)
        return loss

    return step


def transformers_gpt2(config: GPTConfig, windows: Tensor) -> Callable[[], Tensor]:
    """GPT2LMHeadModel without dropout, with its default attention."""
    import transformers  # type: ignore[import-not-found]

    hidden, layers, heads = config.shape
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.sequence_length,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    model = model.to(windows.device).train()
    return plain_gpt.training_step(model, lambda tokens: model(tokens).logits, windows)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out")
    options = parser.parse_args()
    config = GPTConfig(
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=options.heads,
        sequence_length=options.tokens,
        vocab_size=options.vocabulary,
    )
    contenders: dict[str, MakeStep] = {"plain": plain_gpt.make_step, "ours": ours}
    if importlib.util.find_spec("transformers"):
        contenders["plain_transformers"] = transformers_gpt2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with process_group.start(device.type) as world:
        shape = (options.batch, options.tokens + 1)
        windows = torch.randint(0, options.vocabulary, shape, device=world.device)
        steps = {name: make(config, windows) for name, make in contenders.items()}
        seconds = measure(steps, options.turns)
    name = f"gpt step h {options.hidden} l {options.layers} n {options.tokens}"
    finish(f"{name} batch {options.batch}", table(seconds), options.out)


if __name__ == "__main__":
    main()
