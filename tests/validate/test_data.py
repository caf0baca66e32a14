import pytest
import torch

from titan_dit.data.base import Field
from titan_dit.objectives.base import Objective
from titan_dit.section import UserError
from titan_dit.validate.data import check_fields


class Takes(Objective):
    takes = ("latent", "label")


def test_data_without_a_field_that_the_objective_takes_are_refused():
    fields = {"latent": Field(torch.float32, (4, 8, 8)), "caption": Field(torch.int64, (7,))}
    with pytest.raises(UserError) as caught:
        check_fields(fields, Takes(), "mine:Pictures")
    assert str(caught.value) == (
        '[data] name="mine:Pictures" has the fields latent, caption, but [objective] takes '
        "latent, label: label is missing. Choose data or an objective that fit each other."
    )
    check_fields(fields | {"label": Field(torch.int64, ())}, Takes(), "mine:Pictures")
