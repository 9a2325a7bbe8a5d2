"""Ranks without mpirun: each is started with the variables that torchrun sets, and they meet at a port."""

import pathlib
import signal
import subprocess
import sys
import time
import unittest

import npy
from command import COMMAND, INPUT, OK, RANK_FAILURE, TIMEOUT, USAGE, CommandTest, environment, longspan

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python" / "tests"))
from free_port import free_port  # noqa: E402

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "LONGSPAN_PORT")


def start(rank, ranks, port, arguments, stdout=subprocess.PIPE, **env):
    inherited = {name: value for name, value in environment().items()
                 if not name.startswith(LAUNCHERS)}
    return subprocess.Popen([COMMAND, *map(str, arguments)], text=True, stdout=stdout,
                            stderr=subprocess.PIPE,
                            env=inherited | {"RANK": str(rank), "WORLD_SIZE": str(ranks),
                                             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                             "LONGSPAN_THREADS": "1"} | env)


class TcpTest(CommandTest):
    def ranks(self, ranks, *arguments, stdout=subprocess.PIPE, **env):
        """The output of each: (status, stdout, stderr)."""
        port = free_port()
        started = [start(rank, ranks, port, arguments, stdout=stdout, **env) for rank in range(ranks)]
        done = []
        for process in started:
            self.addCleanup(process.kill)
            out, err = process.communicate(timeout=300)
            done.append((process.returncode, out, err))
        return done

    def test_verify(self):
        for ranks in (2, 3):
            with self.subTest(ranks=ranks):
                done = self.ranks(ranks, "verify", "--quick", "--seed", ranks)
                self.assertEqual([status for status, _, _ in done], [OK] * ranks, done)
                rows = [text for text in done[0][1].splitlines() if not text.startswith("#")]
                self.assertEqual(len(rows), 20, done[0])
                compared = [text for text in rows if ranks == 2 or not text.startswith(" same bits")]
                self.assertTrue(all(text.endswith("pass") for text in compared), done[0])
                self.assertIn(f"TCP | {ranks} ranks, 1 node", done[0][1])

    def test_the_bits_of_one_rank_and_of_mpirun(self):
        heads, dim, keys = 2, 16, 700
        for name, shape, seed in (("q", (3, heads, dim), 1), ("k", (keys, heads, dim), 2),
                                  ("v", (keys, heads, dim), 3)):
            npy.save(self.path(f"{name}.npy"), shape, npy.draw(shape, seed, "<f4"), "<f4")

        def arguments(name):
            return ["run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v",
                    self.path("v.npy"), "--causal", "--out", self.path(name)]

        self.ends(longspan(0, *arguments("alone.npy")), OK)
        alone = self.path("alone.npy").read_bytes()
        for ranks in (2, 4):
            done = self.ranks(ranks, *arguments(f"tcp{ranks}.npy"))
            self.assertEqual([status for status, _, _ in done], [OK] * ranks, done)
            self.assertEqual(self.path(f"tcp{ranks}.npy").read_bytes(), alone)
        if len(self.rank_counts) > 1:
            self.ends(longspan(2, *arguments("mpi.npy")), OK)
            self.assertEqual(self.path("mpi.npy").read_bytes(), alone)

    def test_standard_output_that_takes_nothing(self):
        """Only rank 0 writes there; all ranks end as it does, and only it prints why."""
        small = ["run", "--kv", 40, "--tokens", 2, "--heads", 2, "--dim", 16, "--iterations", 1]
        for arguments in (small, ["--help"], ["bench", "decode", "--kv", 50, "--heads", 2, "--kv-heads", 1, "--dim", 16,
                                              "--layers", 1, "--iterations", 1]):
            with self.subTest(arguments=arguments[:2]), open("/dev/full", "w", encoding="ascii") as full:
                done = self.ranks(2, *arguments, stdout=full)
                self.assertEqual([status for status, _, _ in done], [INPUT, INPUT], done)
                self.assertRegex(done[0][2], "^longspan: .*standard output cannot be written: No space[^\n]*\n$")
                self.assertEqual(done[1][2], "")

    def test_a_rank_that_does_not_come(self):
        port = free_port()
        process = start(1, 2, port, ["verify", "--quick"], LONGSPAN_DEADLINE_S="1")
        self.addCleanup(process.kill)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, TIMEOUT, err)
        self.assertIn("Rank 0 did not answer", err)

    def test_another_number_of_ranks(self):
        port = free_port()
        zero = start(0, 2, port, ["verify", "--quick"], LONGSPAN_DEADLINE_S="4")
        self.addCleanup(zero.kill)
        one = start(1, 3, port, ["verify", "--quick"], LONGSPAN_DEADLINE_S="4")
        self.addCleanup(one.kill)
        _, err = one.communicate(timeout=60)
        self.assertEqual(one.returncode, USAGE, err)
        self.assertIn("number of ranks", err)
        _, err = zero.communicate(timeout=60)
        self.assertEqual(zero.returncode, TIMEOUT, err)
        self.assertIn("Rank 1 did not come", err)

    def test_a_rank_that_is_killed(self):
        port = free_port()
        several = [start(rank, 3, port, ["verify", "--quick"], LONGSPAN_DEADLINE_S="50")
                   for rank in range(3)]
        for process in several:
            self.addCleanup(process.kill)
        for text in several[0].stdout:  # the first row: all are still running
            if not text.startswith("#"):
                break
        several[2].send_signal(signal.SIGKILL)
        for process in several[:2]:
            _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, RANK_FAILURE, err)
        several[2].communicate(timeout=10)

    def test_a_rank_that_is_killed_in_a_backward(self):
        """Most of the time of these runs is their backward."""
        port = free_port()
        several = [start(rank, 3, port, ["run", "--backward", "--kv", 600, "--tokens", 600, "--shard-queries",
                                         "--iterations", 1000000, "--check", "off"], LONGSPAN_DEADLINE_S="20")
                   for rank in range(3)]
        for process in several:
            self.addCleanup(process.kill)
        for text in several[0].stdout:
            if "# keys" in text:  # the layer is made
                break
        time.sleep(1)
        several[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            _, err = several[rank].communicate(timeout=60)
            self.assertIn(several[rank].returncode, (RANK_FAILURE, TIMEOUT), err)
            self.assertIn("ank 1 ", err)
        several[1].communicate(timeout=10)


if __name__ == "__main__":
    unittest.main()
