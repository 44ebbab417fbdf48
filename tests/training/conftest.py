"""What the tests of training share."""

import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def unsynced():
    """No test cuts the power; waiting for the disk is a third of a run of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
