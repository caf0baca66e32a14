"""[fid]: samples that are no numbers are not scored."""

import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.config.training import FIDConfig, SamplingConfig
from titan_dit.objectives.base import DataShare, Objective
from titan_dit.scores.features import Features
from titan_dit.scores.score import statistics_of
from titan_dit.validation import evaluation


class Drawing(Objective):
    """An objective whose sample `lost` is NaN."""

    def __init__(self, lost=None):
        self.lost = lost

    def picture_size(self, sampling):
        return 2

    def knows_classes(self, like):
        return False

    def picture_conditions(self, num, like):
        return lambda numbers: {"labels": torch.zeros_like(numbers)}

    def pictures(self, forward, sampling, seed, conditions, batches, share):
        for numbers in batches:
            pixels = torch.randint(0, 256, (len(numbers), 2, 2, 3), dtype=torch.uint8)
            yield pixels, numbers != (-1 if self.lost is None else self.lost)


def scores(objective):
    config = FIDConfig(every=1, reference="x", num=70, metrics=("fid",))
    network = Features("own", "0", lambda pictures: (pictures.flatten(1).float(), None))
    real = statistics_of(torch.rand(70, 12), None)
    chosen = evaluation.Evaluation(
        evaluation.drawing_pictures(objective), config, network, real, {}
    )
    share = DataShare(torch.device("cpu"))
    return chosen.scores(lambda *_: None, SamplingConfig(), 0, share, lambda: None)


def test_samples_that_are_not_finite_are_counted_and_not_scored(capsys):
    assert len(scores(Drawing())) == 1
    assert scores(Drawing(lost=69)) == {}
    assert "1 of 70 samples are NaN or infinite: no scores" in capsys.readouterr().out


def test_an_objective_without_pictures_is_refused_by_what_it_lacks():
    with pytest.raises(UserError, match=r"Objective has no picture_size, knows_classes, picture_"):
        evaluation.drawing_pictures(Objective())
