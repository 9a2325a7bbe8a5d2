import os
import pathlib
import sys
import zlib

import hypothesis
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import device

# Settings of the user are not read (tests/settings.cmake).
os.environ["XDG_CONFIG_HOME"] = os.devnull
os.environ.pop("LONGSPAN_MACHINE", None)
# Failed cases are kept in the build folder, not among the sources.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(pathlib.Path(__file__).parents[2] / "build" / "hypothesis"))
device.take_device()
# Draws are the same in every run, so that a change is to blame for what fails (tests/support/fresh_seed.hpp).
NEW_SEEDS = os.environ.get("LONGSPAN_TEST_SEEDS") == "new"
hypothesis.settings.register_profile("here", deadline=None, max_examples=80, derandomize=not NEW_SEEDS)
hypothesis.settings.load_profile("here")


# The tiers of docs/contributing/testing.md. Without one, as when pytest is called by hand, CI's.
LEFT_OUT = {"quick": ("more", "long"), "all": ("long",), "long": ()}[os.environ.get("LONGSPAN_TEST_TIER", "all")]


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if any(item.get_closest_marker(tier) for tier in LEFT_OUT)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report):
    """Prints failures at once: a run that is stopped prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        why = getattr(report.longrepr, "reprcrash", None)
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s): {why.message if why else ''}"[:1000],
              file=sys.__stderr__, flush=True)


@pytest.fixture
def rng(request):
    name = request.node.nodeid.encode()
    return np.random.default_rng(None if NEW_SEEDS else zlib.crc32(name))


@pytest.fixture(scope="session")
def torch_ranks():
    """Four processes of torch.distributed, or one a GPU, for all tests that need them."""
    pytest.importorskip("torch")
    from torch_ranks import TorchRanks

    made = TorchRanks(device.most_ranks())
    yield made
    assert made.end() == [0] * made.size
