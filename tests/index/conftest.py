import os

import pytest


@pytest.fixture(autouse=True)
def no_power_loss(monkeypatch):
    """Do not wait for the disk: these tests kill processes, not machines."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
