"""A rank that stops or dies: the others end in time, name it, and write nothing."""

import os
import signal
import subprocess
import time
import unittest

from command import TIMEOUT, CommandTest, environment, error_lines, line, wait_for

ENDLESS = ["run", "--kv", 4096, "--tokens", 16, "--iterations", 1000000, "--check", 0]


def ranks_below(pid):
    """The processes that mpirun started."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
            return [int(child) for child in children.read().split()]
    except OSError:
        return []


def spent(pid):
    """Seconds of CPU time of a process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class FailureTest(CommandTest):
    def start(self, *extra, mpirun=()):
        self.needs_mpi()
        command = line(3, *ENDLESS, "--out", self.path("out.npy"), *extra)
        process = subprocess.Popen([command[0], *mpirun, *command[1:]], env=environment(OMPI_MCA_odls_base_sigkill_timeout="1"),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        self.assertTrue(wait_for(lambda: len(ranks_below(process.pid)) == 3))
        ranks = sorted(ranks_below(process.pid))
        # All are well into their work: far past the start.
        self.assertTrue(wait_for(lambda: all(spent(pid) > 1.0 for pid in ranks)))
        return process, ranks

    def end(self, process, seconds):
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            self.fail("mpirun still ran after the deadline")
        self.assertEqual(list(self.folder.iterdir()), [])
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def test_stopped_rank(self):
        for victim in (0, 1):
            with self.subTest(victim=victim):
                process, ranks = self.start("--deadline", 3)
                os.kill(ranks[victim], signal.SIGSTOP)
                begin = time.monotonic()
                try:
                    done = self.end(process, 60)
                finally:
                    for pid in ranks:
                        try:
                            os.kill(pid, signal.SIGKILL)
                        except ProcessLookupError:
                            pass
                self.assertEqual(done.returncode, TIMEOUT, done.stderr)
                self.assertLess(time.monotonic() - begin, 30)
                self.assertTrue(error_lines(done), done.stderr)
                for text in error_lines(done):
                    self.assertIn(f"Rank {victim} did not come to", text)

    def test_killed_rank_ends_the_job(self):
        process, ranks = self.start("--deadline", 20)
        os.kill(ranks[1], signal.SIGKILL)
        self.assertEqual(self.end(process, 60).returncode, 128 + signal.SIGKILL)

    def test_killed_rank_is_named_by_the_survivors(self):
        process, ranks = self.start("--deadline", 5, mpirun=["--enable-recovery"])
        os.kill(ranks[1], signal.SIGKILL)
        done = self.end(process, 60)  # mpirun's own status means nothing here
        self.assertEqual(len(error_lines(done)), 2, done.stderr)
        for text in error_lines(done):
            self.assertIn("Rank 1 ", text)

    def test_interrupted_run_writes_nothing(self):
        process, _ = self.start()
        process.send_signal(signal.SIGTERM)
        self.assertNotEqual(self.end(process, 60).returncode, 0)


if __name__ == "__main__":
    unittest.main()
