"""Imported once by the process that ranks are forked from; building a model makes torch import the rest of itself."""

import torch

torch.set_num_threads(1)

import k3lite.parallel  # noqa: E402, F401
from tests.helpers import random_model, tiny  # noqa: E402

random_model(tiny())
