"""The commands that README.md, docs/start/command.md and docs/reference/command.md tell a user to
type run unchanged: in bash, in a folder like a fresh clone with the command built, with none of this
machine's settings for MPI. And the help."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import unittest

import npy
from command import COMMAND, OK, SESSIONS, CommandTest, longspan

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPED = re.compile(r"(\$ )?((source|longspan|mpirun|python3 bench/)\b.*|\w+=\S+)")


def blocks(page):
    """The indented blocks of a page that are typed: their lines, without the prompt."""
    found = []
    for block in re.findall(r"(?:^    .*\n)+", (ROOT / page).read_text(encoding="utf-8"), re.M):
        lines = [line.strip() for line in block.splitlines()]
        prompts = [line for line in lines if line.startswith("$ ")]
        typed = [TYPED.fullmatch(line) for line in prompts or lines]
        if all(typed):
            found.append([match.group(2) for match in typed])
    return found


def short(line):
    """The same with fewer keys where there are many: it must run, not measure."""
    line = re.sub(r"(?<=[ ])\d{5,}\b", "2048", line)
    return line + " --kv 512" if "bench scale" in line and "--kv" not in line else line


class DocumentsTest(CommandTest):
    def setUp(self):
        super().setUp()
        self.needs_mpi()
        shutil.copy(ROOT / "env.sh", self.folder)
        shutil.copytree(ROOT / "bench", self.folder / "bench",
                        ignore=shutil.ignore_patterns("results", "__pycache__"))
        self.path("examples").symlink_to(ROOT / "examples")
        self.path("build/default/bin").mkdir(parents=True)
        self.path("build/default/bin/longspan").symlink_to(os.path.abspath(COMMAND))
        for name, shape in (("q", (9, 4, 16)), ("k", (70, 2, 16)), ("v", (70, 2, 16)), ("dout", (9, 4, 16))):
            npy.save(self.path(f"{name}.npy"), shape, npy.draw(shape, name))
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("OMPI_", "LONGSPAN_"))}
        self.environment["OMPI_MCA_orte_tmpdir_base"] = SESSIONS.name
        self.environment["XDG_CONFIG_HOME"] = str(self.path("settings"))  # where `calibrate` saves

    def types(self, lines):
        return subprocess.run(["bash", "-euc", "\n".join(map(short, lines))], cwd=self.folder,
                              env=self.environment, capture_output=True, text=True, timeout=400)

    def runs(self, lines):
        with self.subTest(lines=lines):
            done = self.types(lines)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_readme(self):
        found = blocks("README.md")
        lines = [line for block in found for line in block]  # one shell, from top to bottom
        self.assertEqual(lines[0], "source ./env.sh")
        self.assertEqual(len([line for line in lines if line.startswith("mpirun")]), 2, lines)
        self.runs(lines)
        self.assertEqual(npy.load(self.path("out.npy"))[1], (512, 12, 32))

    def test_quick_start_of_the_command(self):
        lines = [line for block in blocks("docs/start/command.md") for line in block]
        self.assertEqual(len(lines), 4, lines)
        self.runs(lines)
        self.assertEqual(npy.load(self.path("lse.npy"))[1], (512, 12))

    def test_page_of_the_command(self):
        found = blocks("docs/reference/command.md")
        lines = [line for block in found for line in block]
        self.assertGreaterEqual(len(lines), 5, lines)
        if importlib.util.find_spec("matplotlib") is None:
            lines = [line for line in lines if "plot.py" not in line]
        self.runs(["source ./env.sh", *lines])
        self.assertEqual(npy.load(self.path("lse.npy"))[1], (9, 4))
        self.assertEqual(len(list(self.path("settings/longspan").glob("*.machine"))), 1)
        # A user's records are kept.
        self.assertTrue(self.path("build/results/scale-cpu.jsonl").exists())
        self.assertFalse(self.path("bench/results").exists())
        self.assertFalse(self.path("docs").exists())

    def test_without_the_line_it_would_not_run(self):
        """The lines above depend on env.sh: the test sees what a new user sees."""
        done = self.types(["mpirun -np 4 longspan run --kv 100 --tokens 1"])
        self.assertNotEqual(done.returncode, 0)


class HelpTest(CommandTest):
    COMMANDS = ([], ["run"], ["verify"], ["bench"], ["bench", "decode"], ["info"], ["env"])

    def help(self, command):
        done = longspan(0, *command, "--help")
        self.ends(done, OK)
        return done.stdout

    def test_no_line_is_longer_than_a_terminal(self):
        for command in self.COMMANDS:
            for line in self.help(command).splitlines():
                self.assertLessEqual(len(line), 80, (command, line))

    def test_each_command_has_its_own_examples(self):
        for command in (["run"], ["verify"], ["bench", "decode"]):
            text = self.help(command)
            examples = re.findall(r"(?m)^ .*longspan (run|verify|bench decode)\b",
                                  text.split("Examples", 1)[1])
            self.assertEqual(set(examples), {" ".join(command)}, text)
        for command in (["bench"], ["info"], ["env"]):
            self.assertNotIn("Examples", self.help(command))

    def test_examples_run(self):
        """Those without a user's files; in one process, and small."""
        for command in (["run"], ["verify"], ["bench", "decode"]):
            text = self.help(command).split("Examples", 1)[1].replace("\\\n", " ")
            lines = re.findall(r"(?m)^  (?:mpirun -np \d+ )?longspan (\S.*)$", text)
            self.assertGreaterEqual(len(lines), 2)
            for line in lines:
                words = short(line).split()
                if "--q" in words or command == ["verify"] and "--quick" not in words:
                    continue
                with self.subTest(line=line):
                    self.ends(longspan(0, *words, timeout=300), OK)

    def test_what_it_says_holds_on_cpu(self):
        self.assertIn("32 layers on GPUs, 4 on CPUs", self.help(["bench", "decode"]))


if __name__ == "__main__":
    unittest.main()
