"""A text encoder of two layers, sharded over data ranks, whose captions several ranks encode."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from titan_dit.data.latent_facts import TextFacts
from titan_dit.diffusion.online_text import OnlineText
from titan_dit.objectives.base import Placement
from titan_dit.parallel import fsdp
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.pictures.text_encoder import TextEncoder

MESHES = ({"pp": 2}, {"cp": 2}, {"tp": 2})
"""Beside two data ranks."""
WIDTH, TOKENS, NUM = 8, 6, 5


class Words(nn.Module):
    """Embeddings, two layers that mix the tokens of a caption, and a norm."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH, num_attention_heads=2)
        self.words = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids)
        for layer in self.layers:
            mean = (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
            x = torch.tanh(layer(x + mean[:, None]))
        return SimpleNamespace(last_hidden_state=self.norm(x))


def online():
    torch.manual_seed(0)
    module = Words().requires_grad_(False)
    encoder = TextEncoder(
        module=module,
        blocks=module.layers,
        tokenizer=lambda text: {"input_ids": [len(text)]},
        kind="Words",
        digest="",
        source="",
        num_layers=2,
        layers=(1, 2),
        template="{}",
        max_tokens=TOKENS,
    )
    return OnlineText(encoder, encoder.facts(TOKENS, "none", torch.zeros(1, 2 * WIDTH)))


def captions(data_rank):
    """Token ids of a data rank's captions, as long as its longest one, and their lengths."""
    generator = torch.Generator().manual_seed(data_rank)
    lengths = torch.randint(1, TOKENS + data_rank - 1, (NUM,), generator=generator)
    ids = torch.randint(1, 20, (NUM, int(lengths.max())), generator=generator)
    return {"text_ids": ids.int(), "text_length": lengths}


def differences(world):
    """By mesh: the largest difference of this rank's embeddings from those of one process.

    And the elements of the encoder's parameters on this rank.
    """
    found = {}
    for axes in MESHES:
        mesh = Mesh(AxisSizes(dp_shard=2, **axes), world.device.type)
        text, alone = online(), online()
        alone.place(Placement.alone(world.device), 0)
        shard = partial(fsdp.shard_frozen, mesh=mesh.data, device=world.device)
        text.place(Placement(shard, 2, partial(mesh.same_samples, world.device)), 0)
        own = captions(mesh.data_rank)
        wanted, fields = alone.embed(own), text.embed(own)
        assert isinstance(text.facts, TextFacts)
        assert fields["text"].shape == (NUM, TOKENS, 2 * WIDTH)
        assert torch.equal(fields["text_length"], own["text_length"])
        error = (fields["text"] - wanted["text"]).abs().max().item()
        held = sum(p.to_local().numel() for p in text.encoder.module.parameters())
        found[str(mesh.sizes)] = error, held
    return found
