"""The examples in Python, run as in their READMEs: each checks its own result."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import longspan
from free_port import free_port

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
LAUNCHERS = ("OMPI_COMM_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "LONGSPAN_", "MASTER_")
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="installed without the repository")


def environment():
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith(LAUNCHERS) and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
             "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    return kept | {"LONGSPAN_THREADS": "1", "OMP_NUM_THREADS": "1", "LONGSPAN_DEADLINE_S": "60"}


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    # Launchers may print two ranks' lines as one.
    return [line.strip() for line in re.split(r"(?=rank \d+ of)|\n", done.stdout) if line.strip()]


def launched(example, ranks):
    """By a launcher of our own, which sets the variables of torchrun."""
    port = free_port()
    common = environment() | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                              "LONGSPAN_PORT": str(port)}
    made = [subprocess.Popen([sys.executable, EXAMPLES / example / "main.py"], env=common | {"RANK": str(r)},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(ranks)]
    outputs = [process.communicate(timeout=120)[0] for process in made]
    assert [process.returncode for process in made] == [0] * ranks, outputs
    return "".join(outputs).splitlines()


def check(lines, example, ranks):
    """Every rank printed the lines of the README, which shows 4 ranks."""
    shown = re.search(r"It prints.*?```\n(.*?)```", (EXAMPLES / example / "README.md").read_text(), re.DOTALL)
    shown = shown[1].splitlines()
    assert len(shown) == 4 and len(lines) == ranks
    if ranks == 4:
        # The last bits of an error depend on the machine, and random numbers on the version of PyTorch.
        blank = re.compile(r"\d\.\de-\d\d|process: [\d ]*|loss [\d.]+( to [\d.]+)?")
        assert sorted(blank.sub("", x) for x in lines) == sorted(blank.sub("", x) for x in shown)
    else:
        assert sorted(line.split(":")[0] for line in lines) == [f"rank {r} of {ranks}" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("example", ["07_python", "10_minilm"])
def test_with_numpy(example, ranks):
    lines = run(sys.executable, EXAMPLES / example / "main.py") if ranks == 1 else launched(example, ranks)
    check(lines, example, ranks)


@pytest.mark.skipif(not shutil.which("mpirun") or "not built in" in longspan.info()["MPI"], reason="no MPI")
def test_under_mpirun():
    check(run("mpirun", "--oversubscribe", "-np", "4", sys.executable, EXAMPLES / "07_python" / "main.py"),
          "07_python", 4)


@pytest.mark.more
@needs_torch
@pytest.mark.parametrize("example, ranks", [("08_torchrun", 4), ("09_llama_shaped", 4), ("09_llama_shaped", 1), ("11_train", 4),
                                            ("11_train", 1), ("12_train_llama", 4)])
def test_under_torchrun(example, ranks):
    script = EXAMPLES / example / "main.py"
    if ranks == 1:
        return check(run(sys.executable, script), example, 1)
    check([line for line in run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python",
                                f"--nproc-per-node={ranks}", sys.executable, script) if line.startswith("rank")],
          example, ranks)


@pytest.mark.more
def test_training_goes_on_where_it_was_saved(tmp_path):
    """To the bit."""
    pytest.importorskip("transformers")

    def losses(*options):
        run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node=2", sys.executable,
            EXAMPLES / "12_train_llama" / "main.py", *options, "--losses", tmp_path / "losses.csv")
        return (tmp_path / "losses.csv").read_text().splitlines()[1:]

    whole = losses("--steps", "6")
    half = losses("--steps", "3", "--save", tmp_path / "half.pt")
    assert half + losses("--steps", "6", "--resume", tmp_path / "half.pt") == whole
