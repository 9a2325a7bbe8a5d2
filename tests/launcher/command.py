"""Starts the longspan command, alone or under mpirun, and keeps its output."""

import os
import pathlib
import subprocess
import tempfile
import time
import unittest

COMMAND = os.environ.get("LONGSPAN_COMMAND", "longspan")
MPIEXEC = os.environ.get("LONGSPAN_MPIEXEC", "")

# The user's constants are not read, and none can be saved (tests/settings.cmake), also without ctest.
os.environ["XDG_CONFIG_HOME"] = os.devnull
os.environ.pop("LONGSPAN_MACHINE", None)

# mpirun's own files: two mpiruns that start at once in the same folder can hinder each other.
SESSIONS = tempfile.TemporaryDirectory(prefix="ls")

# Exit statuses, as in `longspan --help`.
OK, INTERNAL, USAGE, INPUT, UNSUPPORTED, WRONG_RESULT, RANK_FAILURE, TIMEOUT, BACKEND = range(9)


def environment(**extra):
    """Ranks may outnumber cores, and root may run them, as in a container. After a rank's non-zero
    exit mpirun waits a second before it kills the others; here they are gone by then."""
    return dict(os.environ) | {"OMPI_ALLOW_RUN_AS_ROOT": "1",
                               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                               "OMPI_MCA_rmaps_base_oversubscribe": "1",
                               "OMPI_MCA_hwloc_base_binding_policy": "none",
                               "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
                               "OMPI_MCA_odls_base_sigkill_timeout": "0",
                               "OMPI_MCA_orte_tmpdir_base": SESSIONS.name,
                               "LONGSPAN_THREADS": "1"} | extra


def line(ranks, *arguments):
    command = [COMMAND, *map(str, arguments)]
    return command if ranks == 0 else [MPIEXEC, "-n", str(ranks), *command]


def longspan(ranks, *arguments, timeout=120, **env):
    """`ranks` 0: without mpirun."""
    return subprocess.run(line(ranks, *arguments), env=environment(**env), timeout=timeout,
                          capture_output=True, text=True)


def each_rank(*argument_lists, folders=(), variables=(), timeout=120):
    """One rank for each list of arguments, each in its folder, and with NAME=VALUE, if given."""
    command = [MPIEXEC]
    for i, arguments in enumerate(argument_lists):
        place = ["-wdir", str(folders[i])] if folders else []
        place += ["-x", variables[i]] if variables else []
        command += ["-n", "1", *place, os.path.abspath(COMMAND), *map(str, arguments), ":"]
    return subprocess.run(command[:-1], env=environment(), timeout=timeout, capture_output=True,
                          text=True)


def error_lines(done):
    """The command's own lines on stderr, without mpirun's."""
    return [text for text in done.stderr.splitlines() if text.startswith("longspan: ")]


class CommandTest(unittest.TestCase):
    """A folder that is empty at the start of each test."""

    rank_counts = (0, 1, 2) if MPIEXEC else (0,)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def path(self, name):
        return self.folder / name

    def ends(self, done, status, *words):
        """The status, and exactly one line on stderr, with all the words."""
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        lines = error_lines(done)
        if status == OK:
            self.assertEqual(lines, [])
            return
        self.assertEqual(len(lines), 1, done.stderr)
        for word in words:
            self.assertIn(str(word), lines[0])

    def needs_mpi(self):
        if not MPIEXEC:
            self.skipTest("this build has no MPI")


def wait_for(condition, seconds=60, pause=0.05):
    """Polls; True once the condition holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(pause)
    return False
