"""Return the message with which an action or a dataset folder is refused."""

import pytest

from titan_dit.config.section import UserError
from titan_dit.data.listing import list_folder


def refused(action):
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


def refused_folder(root, **how):
    with pytest.raises(UserError) as caught:
        list_folder(root, **how)
    assert str(caught.value).startswith("[data] ")
    assert str(root) in str(caught.value)
    return str(caught.value)
