import os
import pathlib
import sys

import hypothesis
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import device

# No constants of the user are read (tests/settings.cmake).
os.environ["XDG_CONFIG_HOME"] = os.devnull
os.environ.pop("LONGSPAN_MACHINE", None)
# Cases that failed are kept where what is built is, not among the sources.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(pathlib.Path(__file__).parents[2] / "build" / "hypothesis"))
device.take_device()
# Where CI is set the draws are the same in every run: a change is to blame for what fails.
hypothesis.settings.register_profile("here", deadline=None, max_examples=80, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("here")


@pytest.fixture
def rng():
    return np.random.default_rng(np.random.SeedSequence().entropy)


@pytest.fixture(scope="session")
def torch_ranks():
    """Four processes of torch.distributed, or one a GPU, for all tests that need them."""
    pytest.importorskip("torch")
    from torch_ranks import TorchRanks

    made = TorchRanks(device.most_ranks())
    yield made
    assert made.end() == [0] * made.size
