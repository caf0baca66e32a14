import pytest

from titan_dit.config.section import UserError
from titan_dit.data.base import DataFacts
from titan_dit.data.latent_facts import LatentFacts, VAEFacts
from titan_dit.data.sections import Digits
from titan_dit.diffusion.fits import as_latent_model, check_data
from titan_dit.models.dit_config import DiTConfig


def model_of(shape, num_classes):
    channels, size, _ = shape
    return DiTConfig(
        hidden_size=8, num_layers=1, num_heads=1, patch_size=2, latent_size=size,
        in_channels=channels,
        num_classes=num_classes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "num_classes", "words"),
    [
        ((4, 8, 8), 10, "channels=4 and latent_size=8 make samples of [4, 8, 8]"),
        ((1, 16, 16), 10, "Set in_channels = 1, latent_size = 8"),
        ((1, 8, 8), 9, "num_classes=9 is less than the 10 classes of [data]. Set num_classes = 10"),
        (
            (1, 8, 8),
            11,
            "num_classes=11 is more than the 10 classes of [data]. Set num_classes = 10",
        ),
        ((1, 8, 8), 11, "data pack --num-classes 11"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_told_what_would(shape, num_classes, words):
    facts = Digits().open().facts
    with pytest.raises(UserError) as caught:
        check_data(facts, model_of(shape, num_classes), "ddpm")
    assert str(caught.value).startswith("[model] ")
    assert words in str(caught.value)
    assert check_data(facts, model_of((1, 8, 8), 10), "ddpm") is facts


@pytest.mark.parametrize(
    ("posterior", "stored", "refused", "fix"),
    [
        ("both", 8, 8, "holds mean and std of [4, 8, 8]. Set in_channels = 4, latent_size = 8."),
        ("mean", 4, 2, "holds [4, 8, 8]. Set in_channels = 4, latent_size = 8."),
        ("", 8, 3, "Set in_channels = 8, latent_size = 8, or in_channels = 4 if half of its"),
    ],
)
def test_a_recorded_mean_and_std_are_never_read_as_twice_the_channels(
    posterior, stored, refused, fix
):
    vae = VAEFacts(kind="AutoencoderKL", digest="1", factor=8)
    facts = LatentFacts(shape=(stored, 8, 8), count=1, num_classes=10, posterior=posterior, vae=vae)
    check_data(facts, model_of((4, 8, 8), 10), "ddpm")
    with pytest.raises(UserError) as caught:
        check_data(facts, model_of((refused, 8, 8), 10), "ddpm")
    assert fix in str(caught.value)
    with pytest.raises(UserError, match="data encode --num-classes 11"):
        check_data(facts, model_of((4, 8, 8), 11), "ddpm")


def test_data_that_say_nothing_of_latents_are_refused():
    with pytest.raises(UserError) as caught:
        check_data(DataFacts(count=3), model_of((1, 8, 8), 10), "ddpm")
    message = str(caught.value)
    assert message.startswith('[objective] name="ddpm" trains on latents')
    assert "must be LatentFacts" in message
    assert "not DataFacts" in message


class Letters:
    name = "letters"
    num_classes = 3

    def spec(self):
        raise NotImplementedError


def test_a_model_of_something_else_is_told_what_it_lacks():
    model = model_of((1, 8, 8), 10)
    assert as_latent_model(model, "ddpm") is model
    with pytest.raises(UserError) as caught:
        as_latent_model(Letters(), "ddpm")
    message = str(caught.value)
    assert message.startswith('[objective] name="ddpm" trains models of latents, but')
    assert (
        'name="letters" has no sample_shape, token_shape, tokenize, detokenize, static.' in message
    )
