"""Trained on masked tokens, a tiny BERT fills them in from their context."""

import pytest
import torch
from test_masked_token import batch_of, rng_of

from titan_dit.data.token_windows import TokenFacts
from titan_dit.models.bert_config import BERTConfig
from titan_dit.objectives.sections import MaskedTokenConfig

N, IDS, MASK = 12, 16, 16
"""Every token of a sample comes twice in a row. Of one token alone the entropy is log 16 = 2.8."""
CPU = torch.device("cpu")


def twins(num, seed):
    """Windows of N + 1 tokens, of which the first is not read."""
    tokens = torch.randint(IDS, (num, N // 2), generator=torch.Generator().manual_seed(seed))
    return torch.cat((tokens[:, :1], tokens.repeat_interleave(2, 1)), 1)


@pytest.mark.parametrize("norm_place", ["post", "pre"])
def test_a_masked_token_is_filled_in_from_its_twin(norm_place):
    config = BERTConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=1,
        vocab_size=IDS + 1,
        sequence_length=N,
        norm_place=norm_place,
        init_std=0.2,
    )
    facts = TokenFacts(count=1, sequence_length=N, vocabulary=IDS)
    section = MaskedTokenConfig(mask_share=0.25)
    objective, model = section.build(config, facts), section.model_spec(config).build()
    generator, initial = torch.Generator().manual_seed(0), model.initializers()
    for name, parameter in model.named_parameters():
        parameter.data = initial[name](parameter.shape, generator)
    static = config.static(CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        batch = batch_of({"tokens": twins(64, step)}, 64 * step)
        prepared = objective.prepare(batch, rng_of(batch))
        losses = model(prepared.inputs, {**prepared.context, **static})
        loss = objective.loss({"losses": losses}, prepared.targets).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.4
    # Logits of a mask set by hand: a model can learn a shift of targets against places, too.
    whole = twins(64, 1000)[:, 1:]
    for place in range(N):
        tokens = whole.index_fill(1, torch.tensor(place), MASK)
        with torch.no_grad():
            logits = model({"tokens": tokens, "types": torch.zeros_like(tokens)}, static)
        found = logits[:, place].argmax(-1)
        assert (found == whole[:, place]).float().mean() > 0.9
