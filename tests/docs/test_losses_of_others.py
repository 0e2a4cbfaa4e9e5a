"""The losses of the guide's updates are those of verl and OpenRLHF, by these packages' own functions.

The packages need Ray and GPUs' kernels to be imported whole, so the files of the functions are loaded by themselves:
``pip install --no-deps verl openrlhf``.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

ROOT, EXACT = Path(__file__).parents[2], 1e-12


def module_of(package, file, stubs):
    """The module of one file of a package that is installed, and not imported; ``stubs``: names that it imports."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}")
    path = Path(spec.origin).parent / file
    name = ".".join([package, *Path(file).with_suffix("").parts])
    loaded = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(loaded)
    with patch.dict(sys.modules, stubs):
        loaded.loader.exec_module(module)
    return module


def clipped_t():
    """The function of the guide."""
    text = (ROOT / "docs" / "guides" / "objectives.md").read_text()
    source = "def clipped_t" + text.partition("def clipped_t")[2].partition("\n\n\ndef ")[0]
    names = {"torch": torch}
    exec(source, names)
    return names["clipped_t"]


def rollouts():
    """Log-probabilities now and before, far apart for some, advantages of both signs, and the answers' mask."""
    generator = torch.Generator().manual_seed(0)
    logps, old, advantage = (torch.randn(6, 9, generator=generator, dtype=torch.float64) for _ in range(3))
    return logps.requires_grad_(), old, advantage, (torch.rand(6, 9, generator=generator) < 0.7).double()


def equal(theirs, mine, logps):
    assert float(theirs) == pytest.approx(float(mine), rel=EXACT)
    gradients = [torch.autograd.grad(loss, logps)[0] for loss in (theirs, mine)]
    torch.testing.assert_close(*gradients, rtol=0, atol=EXACT)


def test_of_verl():
    stubs = ("tensordict", "verl", "verl.utils", "verl.utils.device")
    functional = module_of("verl", "utils/torch_functional.py", {name: MagicMock() for name in stubs})
    stubs = ("omegaconf", "verl", "verl.utils", "verl.trainer.config", "verl.utils.import_utils", "verl.workers.config")
    algorithms = module_of(
        "verl", "trainer/ppo/core_algos.py",
        {name: MagicMock() for name in stubs} | {"verl.utils.torch_functional": functional},
    )  # fmt: skip
    algorithms.verl_F, algorithms.AlgoConfig = functional, type("AlgoConfig", (), {})
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={})
    config.get = lambda name, default: default
    logps, old, advantage, mask = rollouts()
    loss, _ = algorithms.compute_policy_loss_vanilla(old, logps, advantage, mask, config=config)
    equal(loss, (clipped_t()(logps, old, advantage, dual_clip=3.0) * mask).sum() / mask.sum(), logps)


def test_of_openrlhf():
    utils = SimpleNamespace(masked_mean=lambda values, mask, dim=None: (values * mask).sum(dim) / mask.sum(dim))
    losses = module_of("openrlhf", "models/loss.py", {"openrlhf.models": MagicMock(), "openrlhf.models.utils": utils})
    logps, old, advantage, mask = rollouts()
    loss, *_ = losses.PolicyLoss()(logps, old, advantage, action_mask=mask)
    equal(loss, (clipped_t()(logps, old, advantage) * mask).sum() / mask.sum(), logps)
