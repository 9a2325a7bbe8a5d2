"""The places of results: through links, to pipes and to standard output; to one file each; and
nothing is left when a limit or a signal ends the command while it writes."""

import json
import os
import resource
import signal
import stat
import subprocess
import threading
import unittest

import npy
from command import COMMAND, INPUT, OK, USAGE, WRONG_RESULT, CommandTest, environment, longspan, \
    line, wait_for

SMALL = ["run", "--kv", 40, "--tokens", 2, "--heads", 2, "--dim", 16, "--iterations", 1]
ELEMENTS = 2 * 2 * 16
LARGE = ["run", "--kv", 8, "--tokens", 4000, "--heads", 64, "--dim", 128, "--iterations", 1,
         "--warmup", 0, "--check", "off"]  # 131 MB


def start(*arguments, **options):
    return subprocess.Popen([COMMAND, *map(str, arguments)], env=environment(),
                            stderr=subprocess.PIPE, text=True, **options)


class OutputsTest(CommandTest):
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    def limited(self, limit, value, *arguments):
        """Under a limit of the process (resource.RLIMIT_...)."""
        return subprocess.run([COMMAND, *map(str, arguments)], env=environment(), text=True,
                              capture_output=True, timeout=120,
                              preexec_fn=lambda: resource.setrlimit(limit, (value, value)))

    def test_through_links(self):
        (self.folder / "deep").mkdir()
        for link, target in (("out.npy", "deep/new.npy"), ("lse.npy", "deep/old.npy")):
            self.path(link).symlink_to(target)
        self.path("deep/old.npy").write_text("old")
        self.path("deep/old.npy").chmod(0o600)
        for ranks in self.rank_counts:
            done = longspan(ranks, *SMALL, "--out", self.path("out.npy"), "--lse",
                            self.path("lse.npy"))
            self.ends(done, OK)
            self.assertTrue(self.path("out.npy").is_symlink())
            self.assertTrue(self.path("lse.npy").is_symlink())
            self.assertEqual(npy.load(self.path("deep/new.npy"))[1], (2, 2, 16))
            self.assertEqual(npy.load(self.path("deep/old.npy"))[1], (2, 2))
            self.assertEqual(stat.S_IMODE(self.path("deep/old.npy").stat().st_mode), 0o600)
            self.assertEqual(sorted(os.listdir(self.folder / "deep")), ["new.npy", "old.npy"])

    def test_new_files_have_the_mode_of_the_umask(self):
        for mask in (0o022, 0o077):
            process = start(*SMALL, "--out", self.path(f"{mask}.npy"), stdout=subprocess.DEVNULL,
                            preexec_fn=lambda: os.umask(mask))
            self.assertEqual(process.communicate(timeout=120)[1], "")
            self.assertEqual(stat.S_IMODE(self.path(f"{mask}.npy").stat().st_mode), 0o666 & ~mask)

    def test_standard_output(self):
        """It has only the array; the table is on stderr. Also where it is a file."""
        with open(self.path("file"), "wb") as file:
            for where in (subprocess.PIPE, file):
                done = subprocess.run([COMMAND, *map(str, SMALL), "--out", "/dev/stdout"],
                                      env=environment(), stdout=where, stderr=subprocess.PIPE)
                self.assertEqual(done.returncode, OK, done.stderr)
                self.assertIn(b"max|err|", done.stderr)
                data = done.stdout if where != file else self.path("file").read_bytes()
                self.assertEqual(data[:6], b"\x93NUMPY")
                self.assertEqual(len(data), 128 + 4 * ELEMENTS)
        done = longspan(0, *SMALL, "--json", "/dev/fd/1")
        self.assertEqual(json.loads(done.stdout)["case"]["kv_len"], 40)
        self.assertEqual(os.stat("/dev/stdout").st_mode, os.stat("/proc/self/fd/1").st_mode)

    def test_pipes(self):
        os.mkfifo(self.path("pipe"))
        got = []
        reader = threading.Thread(target=lambda: got.append(self.path("pipe").read_bytes()))
        reader.start()
        self.ends(longspan(0, *SMALL, "--out", self.path("pipe")), OK)
        reader.join(60)
        self.assertEqual(len(got[0]), 128 + 4 * ELEMENTS)
        self.assertTrue(self.path("pipe").is_fifo())
        self.ends(longspan(0, *SMALL, "--out", self.path("pipe")), INPUT, "pipe", "nobody reads")

    def test_devices(self):
        self.ends(longspan(0, *SMALL, "--out", "/dev/null", "--lse", "/dev/null", "--json",
                           "/dev/null"), OK)
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        self.ends(longspan(0, *SMALL, "--out", "/dev/full"), INPUT, "/dev/full", "No space")

    def test_one_file_for_two(self):
        for name in ("q", "k", "v"):
            npy.save(self.path(f"{name}.npy"), (40, 2, 16), npy.draw((40, 2, 16), name))
        files = [word for name in "qkv" for word in (f"--{name}", self.path(f"{name}.npy"))]
        self.path("soft").symlink_to("x.npy")
        self.path("to_q").symlink_to("q.npy")
        os.link(self.path("k.npy"), self.path("hard_k"))
        before = self.names()
        for a, b, extra in (("x.npy", "x.npy", []), ("x.npy", "soft", []),
                            ("x.npy", "../" + self.folder.name + "/x.npy", []),
                            ("q.npy", "x.npy", files), ("x.npy", "to_q", files),
                            ("hard_k", "x.npy", files)):
            for ranks in self.rank_counts:
                with self.subTest(a=a, b=b, ranks=ranks):
                    arguments = ["run", *extra] if extra else SMALL
                    done = longspan(ranks, *arguments, "--out", self.path(a), "--lse", self.path(b))
                    self.ends(done, USAGE, "same file")
                    self.assertEqual(self.names(), before)

    def test_limit_of_the_file_size(self):
        done = self.limited(resource.RLIMIT_FSIZE, 1 << 20, *LARGE, "--out", self.path("out.npy"))
        self.ends(done, INPUT, "out.npy", "File too large")
        self.assertEqual(self.names(), [])

    def test_signals_while_it_writes(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
            with self.subTest(number=number):
                process = start(*LARGE, "--out", self.path("out.npy"), stdout=subprocess.PIPE)

                def writes():
                    if process.poll() is not None:
                        return True
                    try:
                        folder = f"/proc/{process.pid}/fd"
                        links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
                    except OSError:
                        return False
                    return any(link.startswith(str(self.folder)) for link in links)

                self.assertTrue(wait_for(writes, pause=0.0005))
                self.assertIsNone(process.poll())
                process.send_signal(number)
                process.communicate(timeout=60)
                self.assertEqual(process.returncode, -number)
                self.assertEqual(self.names(), [])

    def test_standard_output_that_takes_nothing(self):
        for arguments in (SMALL, ["--help"], ["info"], ["verify", "--quick"]):
            with self.subTest(arguments=arguments[:1]):
                with open("/dev/full", "w", encoding="ascii") as full:
                    process = start(*arguments, stdout=full)
                    errors = process.communicate(timeout=120)[1]
                self.assertEqual(process.returncode, INPUT, errors)
                self.assertRegex(errors, "^longspan: .*standard output cannot be written: No space")
                process = start(*arguments, stdout=None, preexec_fn=lambda: os.close(1))
                errors = process.communicate(timeout=120)[1]
                self.assertEqual(process.returncode, INPUT, errors)
                self.assertRegex(errors, "^longspan: .*standard output cannot be written")
        read, write = os.pipe()
        os.close(read)
        process = start(*SMALL, "--out", self.path("out.npy"), stdout=write)
        os.close(write)
        self.assertRegex(process.communicate(timeout=120)[1], "Broken pipe")
        self.assertEqual(process.returncode, INPUT)
        self.assertEqual(self.names(), [])

    def test_closed_streams_do_not_get_into_files(self):
        """A file that is opened first must not become standard output or error."""
        process = start(*SMALL, "--out", self.path("out.npy"), stdout=subprocess.DEVNULL,
                        preexec_fn=lambda: (os.close(0), os.close(2)))
        process.communicate(timeout=120)
        self.assertEqual(process.returncode, OK)
        self.assertEqual(len(self.path("out.npy").read_bytes()), 128 + 4 * ELEMENTS)

    def test_a_pipe_as_input(self):
        npy.save(self.path("k.npy"), (40, 2, 16), npy.draw((40, 2, 16), 1))
        os.mkfifo(self.path("pipe"))
        for ranks in self.rank_counts:
            done = longspan(ranks, "run", "--q", self.path("pipe"), "--k", self.path("k.npy"),
                            "--v", self.path("k.npy"), timeout=60)
            self.ends(done, INPUT, "pipe", "not a regular file")

    def test_out_of_address_space(self):
        """The figure where it can be computed; never an abort, wherever memory ends."""
        statuses = set()
        for mebibytes in (200, 300, 400, 600):
            done = self.limited(resource.RLIMIT_AS, mebibytes << 20, "run", "--kv", 1 << 20,
                                "--tokens", 1, "--iterations", 1, "--check", 0)
            self.assertIn(done.returncode, (USAGE, 8), done.stdout + done.stderr)
            statuses.add(done.returncode)
        self.assertIn(USAGE, statuses)


    def test_out_of_address_space_on_three_ranks(self):
        """Where memory ends differs from limit to limit: at a thread, at a tensor, in MPI itself."""
        self.needs_mpi()
        command = line(3, "run", "--tokens", 4, "--heads", 8, "--iterations", 1, "--kv")
        for mebibytes in (285, 300, 330):
            for kv in (2000, 60000):
                limit = mebibytes << 20
                done = subprocess.run(
                    [*command, str(kv)], env=environment(), capture_output=True, text=True,
                    timeout=120,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
                self.assertNotIn("terminate called", done.stderr, (mebibytes, kv))
                self.assertNotEqual(done.returncode, 134, (mebibytes, kv))


class WrongTest(CommandTest):
    """A wrong result: here by keys that a lossy option rounds, compared without it."""

    def files(self, spread):
        shape = (48, 1, 128)
        for name in "qkv":
            npy.save(self.path(f"{name}.npy"), shape,
                     [spread * x for x in npy.draw(shape, f"{name}{spread}")])
        return [word for name in "qkv" for word in (f"--{name}", self.path(f"{name}.npy"))]

    def test_large_scores_are_not_wrong(self):
        """Arrays of standard deviation 4 and dim 128 have scores of hundreds."""
        for spread in (1, 4, 20):
            for extra in ([], ["--causal"]):
                done = longspan(0, "run", *self.files(spread), "--check", "all", *extra)
                self.ends(done, OK)
        for scale in (1, 10, 100, 1e4):
            for ranks in self.rank_counts:
                with self.subTest(scale=scale, ranks=ranks):
                    self.ends(longspan(ranks, "run", "--kv", 700, "--tokens", 40, "--check", "all",
                                       "--scale", scale), OK)

    def test_a_wrong_result_is_written_only_when_asked(self):
        """An lse of +-3e38 in fp32: its scores overflow, which float64 does not."""
        shape = (2, 1, 16)
        for name in "qkv":
            npy.save(self.path(f"{name}.npy"), shape, [1e20] * 32)
        files = [word for name in "qkv" for word in (f"--{name}", self.path(f"{name}.npy"))]
        arguments = ["run", *files, "--out", self.path("out.npy"), "--json", self.path("r.json")]
        for ranks in self.rank_counts:
            for path in ("out.npy", "r.json"):
                self.path(path).unlink(missing_ok=True)
            self.ends(longspan(ranks, *arguments), WRONG_RESULT, "farther from float64",
                      "nothing was written", "--write-anyway")
            self.assertFalse(self.path("out.npy").exists())
            self.ends(longspan(ranks, *arguments, "--write-anyway"), WRONG_RESULT, "was written")
            self.assertEqual(npy.load(self.path("out.npy"))[1], shape)
            self.assertFalse(json.loads(self.path("r.json").read_text())["check"]["right"])
            self.path("out.npy").unlink()
            self.ends(longspan(ranks, *arguments, "--check", "off"), OK)
            self.assertTrue(self.path("out.npy").exists())


if __name__ == "__main__":
    unittest.main()
