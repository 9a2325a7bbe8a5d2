import pathlib
import sys

import hypothesis
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
hypothesis.settings.register_profile("here", deadline=None, max_examples=80)
hypothesis.settings.load_profile("here")


@pytest.fixture
def rng():
    return np.random.default_rng(np.random.SeedSequence().entropy)
