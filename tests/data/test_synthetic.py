import pickle

import pytest
import torch

from titan_dit.data.sections import Synthetic


def test_synthetic_samples_are_a_function_of_their_index():
    config = Synthetic(latent_size=8, channels=4, num_classes=3, count=50)
    source, again = config.open(), pickle.loads(pickle.dumps(config.open()))
    drawn = torch.stack([source[i]["latent"] for i in range(50)])
    assert drawn.shape == (50, 4, 8, 8)
    assert len(source) == 50
    assert torch.equal(again[49]["latent"], drawn[49])
    assert again[49]["label"] == 49 % 3
    assert abs(drawn.mean().item()) < 0.03
    assert drawn.std().item() == pytest.approx(1, abs=0.03)
    assert not torch.equal(drawn[0], drawn[1])


def test_synthetic_pictures_are_clips_of_one_frame():
    source = Synthetic(latent_size=8, channels=4, num_classes=3).open()
    clips = source.as_clips()
    assert clips.facts.shape == clips.fields["latent"].shape == (4, 1, 8, 8)
    assert torch.equal(clips[7]["latent"][:, 0], source[7]["latent"])
