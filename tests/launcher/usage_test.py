"""The message for a wrong command line: the wrong word, the probable one, and status 2."""

import contextlib
import json
import os
import pathlib
import pty
import subprocess
import unittest

import npy
from command import COMMAND, INPUT, OK, USAGE, CommandTest, each_rank, environment, error_lines, line, longspan

SMALL = ["--kv", 40, "--tokens", 2, "--heads", 2, "--dim", 16, "--iterations", 1, "--warmup", 0]


class UsageTest(CommandTest):
    def told(self, arguments, *words, absent=()):
        with self.subTest(arguments=arguments):
            done = longspan(0, *arguments)
            self.ends(done, USAGE, *words)
            self.assertEqual(done.stdout, "")
            for word in absent:
                self.assertNotIn(word, done.stderr)

    def test_a_misspelt_option_is_named_with_the_nearest(self):
        self.told(["run", "--kvv", 100], 'run has no option "--kvv"; did you mean --kv?',
                  "longspan run --help", absent=["100"])
        self.told(["run", "--kvv=100"], '"--kvv"; did you mean --kv?')
        self.told(["run", *SMALL, "--casual"], "did you mean --causal?")
        self.told(["run", "--shard-q"], "did you mean --shard-queries?")
        self.told(["bench", "decode", "--itertions", 3], "bench decode", "did you mean --iterations?")
        self.told(["plan", "--ranks-per-nod", 3], "did you mean --ranks-per-node?")
        self.told(["run", "--telepathy", 3], 'run has no option "--telepathy" (', absent=["mean"])
        self.told(["run", "-k", "k.npy"], 'run has no option "-k"', absent=["k.npy"])

    def test_an_option_of_another_command(self):
        self.told(["verify", "--softcap", 3], 'verify has no option "--softcap"; run has it')
        self.told(["run", "--csv", "t.csv"], "bench scale has it", absent=["t.csv"])
        self.told(["--csv", "t.csv"], 'longspan alone has no option "--csv"; bench scale has it')

    def test_a_misspelt_command(self):
        self.told(["bench", "decod"], '"bench decod"; did you mean bench decode?')
        self.told(["bench"], "bench is not a command by itself", "bench decode, bench scale")
        self.told(["rum"], '"rum"; did you mean run?')
        self.told(["decode"], "did you mean bench decode?")
        self.told(["help"], "did you mean longspan --help?")
        self.told(["dance"], '"dance"', "run, verify, bench decode", absent=["mean"])

    def test_a_value_that_nothing_takes(self):
        self.told(["run", "--kv", 10, 20], '"20"', "--kv takes one value")
        self.told(["run", "--causal", "yes"], '"yes"', "--causal takes no value")
        self.told(["run", "q.npy"], '"q.npy" stands behind no option')
        self.told(["run", "--kv", 10, "verify"], "verify")

    def test_a_value_that_is_missing(self):
        self.told(["run", "--kv"], "--kv needs a value")
        self.told(["run", *SMALL, "--out"], "--out needs a value")
        self.told(["run", *SMALL, "--out", "--digest"], '--out: "--digest" is not a file name')
        self.told(["run", "--kv", 1, "--kv", 2], "--kv was given 2 times")
        self.told(["run", "--causal=maybe"], "--causal takes no value")

    def test_options_that_rule_each_other_out(self):
        self.told(["run", "--lengths", 40, "--kv", 30], "--kv", "--lengths", "cannot be given together")
        self.told(["verify", "--quick", "--full"], "--quick", "--full", "cannot be given together")
        self.told(["run", "--q", "q.npy"], "--q needs --", "which was not given")

    def test_misspelt_words_have_one_status(self):
        for option, word, meant in (("--strategy", "gather_states", "gather-states"), ("--dtype", "fp23", "fp32"),
                                    ("--qkv-dtype", "e4m", "e4m3"), ("--backend", "cude", "cuda"),
                                    ("--alibi", "contxt", "context"), ("--exchange", "gahter", "gather")):
            self.told(["run", option, word], f'{option}: "{word}" is not one of', f"did you mean {meant}?")
        self.told(["bench", "scale", "--strategies", "ringkv"], "did you mean ring-kv?")
        self.told(["bench", "scale", "--phases", "prefil"], "did you mean prefill?")
        self.told(["run", "--shard", "zigzagg"], '"zigzagg" is not one of', "did you mean zigzag?")
        self.told(["reshard", "--to", "stripped"], "did you mean striped?")

    def test_the_status_is_documented(self):
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/reference/command.md").read_text(encoding="utf-8")
        for status in range(9):
            self.assertRegex(page, rf"(?m)^\| {status} \|")

    def test_no_message_names_an_option_that_is_not_there(self):
        for command in (["bench", "scale"], ["plan"], ["calibrate"], ["verify"], ["reshard"]):
            text = " ".join(longspan(0, *command, "--help").stdout.split())
            self.assertNotRegex(text, r"(?<!longspan run )--list-strategies")

    def test_one_name_for_the_keys_of_a_sequence(self):
        plans = []
        for name in ("--kv", "--keys"):
            done = longspan(0, "plan", name, 5000, "--json", "-")
            self.ends(done, OK)
            plans.append(json.loads(done.stdout))
        self.assertEqual(plans[0], plans[1])
        self.assertEqual(plans[0]["kv_len"], 5000)
        text = longspan(0, "plan", "--help").stdout
        self.assertIn("--kv N", text)
        self.assertNotIn("--keys", text)

    def test_on_one_rank_of_two(self):
        self.needs_mpi()
        base = ["run", *SMALL]
        self.ends(each_rank(base, base + ["--kvv", 3]), USAGE, 'rank 1: run has no option "--kvv"')
        self.ends(each_rank(base + ["--dtype", "fp23"], base), USAGE, "rank 0: --dtype")
        self.ends(longspan(3, *base, "--strategy", "telepathy"), USAGE, "telepathy")


class StandardOutputTest(CommandTest):
    """`-` is standard output, which then has nothing else."""

    def test_records(self):
        commands = [["run", *SMALL], ["reshard", "--kv", 50, "--dim", 8, "--kv-heads", 1, "--iterations", 1],
                    ["plan", "--kv", 1000],
                    ["bench", "decode", "--kv", 50, "--heads", 2, "--kv-heads", 1, "--dim", 16, "--layers", 1,
                     "--iterations", 1],
                    ["bench", "scale", "--kv", 64, "--heads", 1, "--dim", 8, "--iterations", 1, "--phases", "decode"]]
        for arguments in commands:
            for ranks in (r for r in self.rank_counts if r != 1):
                with self.subTest(command=arguments[0], ranks=ranks):
                    done = subprocess.run(line(ranks, *arguments, "--json", "-"), env=environment(), cwd=self.folder,
                                          capture_output=True, text=True, timeout=120)
                    self.ends(done, OK)
                    self.assertIn("longspan", json.loads(done.stdout))
                    self.assertIn("# longspan", done.stderr)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_arrays_and_tables(self):
        done = subprocess.run(line(0, "run", *SMALL, "--out", "-"), env=environment(), cwd=self.folder,
                              capture_output=True, timeout=60)
        self.assertEqual((done.stdout[:6], len(done.stdout)), (b"\x93NUMPY", 128 + 4 * 2 * 2 * 16))
        done = subprocess.run(line(0, "bench", "scale", "--kv", "64", "--heads", "1", "--dim", "8", "--iterations", "1",
                                   "--phases", "decode", "--csv", "-"), env=environment(), cwd=self.folder,
                              capture_output=True, text=True, timeout=60)
        self.assertTrue(done.stdout.startswith("phase,"), done.stdout)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_two_of_them(self):
        self.ends(longspan(0, "run", *SMALL, "--out", "-", "--json", "-"), USAGE, "same file")
        self.ends(longspan(0, "run", *SMALL, "--out", "-", "--json", "/dev/stdout"), USAGE, "same file")
        x = self.path("x")
        self.ends(longspan(0, "bench", "scale", "--json", x, "--csv", x), USAGE, "same file")
        x.write_text("flops_per_s 1\n")
        self.ends(longspan(0, "plan", "--machine", x, "--json", x), USAGE, "same file")

    def test_that_takes_nothing(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run(line(0, "run", *SMALL, "--json", "-"), env=environment(), stdout=full,
                                  stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(done.returncode, INPUT)
        self.assertEqual(len(error_lines(done)), 1, done.stderr)
        self.assertIn("standard output cannot be written: No space", error_lines(done)[0])


class ProgressTest(CommandTest):
    def test_what_will_be_done_is_said_first(self):
        for ranks in self.rank_counts:
            done = longspan(ranks, "run", *SMALL)
            self.ends(done, OK)
            self.assertRegex(done.stdout.splitlines()[1], r"^# to do: 2 query rows, 40 keys, 2 heads \| "
                                                          r"[\d.]+ \S+ on a (rank|GPU) \| 1 run, predicted [\d.]+ \S+ each$")
            self.assertEqual(done.stderr if ranks == 0 else "", "")

    def test_a_terminal_sees_progress_and_is_left_clean(self):
        ours, theirs = pty.openpty()
        try:
            done = subprocess.run(line(0, "run", "--kv", 3000, "--tokens", 64, "--iterations", 3), stdout=subprocess.PIPE,
                                  stderr=theirs, env=environment(), timeout=60)
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # at the end; a read gives what has come through so far
                while some := os.read(ours, 1 << 16):
                    shown += some
            shown = shown.decode()
        finally:
            os.close(ours)
        self.assertEqual(done.returncode, OK)
        self.assertIn("comparing with float64", shown)
        self.assertTrue(shown.endswith("\r\x1b[K"), repr(shown))
        self.assertNotIn("\n", shown)
        self.assertNotIn(b"\r", done.stdout)


class OddArgumentsTest(CommandTest):
    """Names that are not text, or too long: one line, and the right status."""

    def raw(self, ranks, *arguments):
        command = [word if isinstance(word, bytes) else str(word).encode() for word in
                   line(ranks, *[a for a in arguments if not isinstance(a, bytes)])]
        command += [a for a in arguments if isinstance(a, bytes)]
        return subprocess.run(command, env=environment(), capture_output=True, timeout=60)

    def one_line(self, done, status):
        self.assertEqual(done.returncode, status, done.stderr)
        lines = [text for text in done.stderr.split(b"\n") if text.startswith(b"longspan: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertNotIn(b"\x1b", done.stderr)
        self.assertLess(len(lines[0]), 2500)
        return lines[0]

    def test_bytes_that_are_no_text(self):
        name = os.fsencode(self.folder) + b"/\xff\xfe.npy"
        npy.save(pathlib.Path(os.fsdecode(name)), (40, 2, 16), npy.draw((40, 2, 16), 1))
        for ranks in (r for r in self.rank_counts if r != 1):
            done = self.raw(ranks, "run", "--json", "-", b"--q", name, b"--k", name, b"--v", name)
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertIn("\ufffd", json.loads(done.stdout)["case"]["inputs"])
            self.one_line(self.raw(ranks, "run", b"--q", b"\xffnone\n\x1b[2J", b"--k", b"k", b"--v", b"v"), INPUT)
        self.one_line(self.raw(0, "run", *SMALL, b"--\xff\x1b[2J"), USAGE)
        self.one_line(self.raw(0, "run", b"--strategy", b"\xff\n\x1b[2J"), USAGE)
        done = subprocess.run([COMMAND, "env", "--json"], env=environment(LONGSPAN_SECRET=os.fsdecode(b"\xff")),
                              capture_output=True, timeout=60)
        self.assertEqual(done.returncode, OK, done.stderr)
        json.loads(done.stdout)

    def test_very_long_ones(self):
        long = b"x" * 100000
        self.one_line(self.raw(0, "run", b"--kv", long), USAGE)
        self.one_line(self.raw(0, "run", b"--" + long), USAGE)
        self.one_line(self.raw(0, long), USAGE)
        self.assertIn(b"too long", self.one_line(self.raw(0, "run", *SMALL, b"--out", long), INPUT))
        for ranks in (r for r in self.rank_counts if r != 1):
            self.assertIn(b"File name too long", self.one_line(
                self.raw(ranks, "run", b"--q", long, b"--k", b"k", b"--v", b"v"), INPUT))


if __name__ == "__main__":
    unittest.main()
