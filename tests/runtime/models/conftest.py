"""transformers, imported once for the folder (8 s), and its models made to compute in the dtype of their weights."""

import os
from types import MethodType

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a hub miss costs 28 s

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def transformers():
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def in_own_dtype(model):
    """The same model, without transformers' casts to float32 in norms and rotary tables, so that float64 is float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(_rotary, module)
    return model


def _rms_norm(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _rotary(self, x, position_ids):
    angles = position_ids[..., None].double() * self.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
