"""What setup.sh would install, configure and build, and pip build, on machines other than this one:
its tools are stand-ins, first on the PATH, that record their calls. And what env.sh finds, and the
main page of the reference names."""

import glob
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMI = 'case "$*" in *compute_cap*) printf "%s" ;; -L) echo "GPU 0: a GPU" ;; esac'
NVCC = """case "$*" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --list-gpu-arch) printf 'compute_%s\\n' {known} ;;
esac"""
NEWEST = NVCC.format(release="13.0", known="75 80 86 87 89 90 100 103 110 120 121")
NO_GPU = not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/usr/lib/wsl/lib/nvidia-smi")


class StandInTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tools = pathlib.Path(folder.name)
        self.log = self.tools / "log"
        self.log.touch()
        self.tool("nvidia-smi", "exit 9")  # as with a driver and no GPU
        self.tool("dpkg-query", "echo installed")

    def tool(self, name, script):
        path = self.tools / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def gpus(self, *capabilities):
        self.tool("nvidia-smi", SMI % "".join(f"{c}\\n" for c in capabilities))

    def sh(self, *command, **switches):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LONGSPAN_", "CUDA"))}
        env |= {"PATH": f"{self.tools}:/usr/bin:/bin", "CUDA_PATH": "/nowhere", "LOG": str(self.log)}
        return subprocess.run(command or ["bash", "./setup.sh"], cwd=ROOT, env=env | switches, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


class SetupTest(StandInTest):

    def dry(self, script="./setup.sh", **switches):
        """(LONGSPAN_CUDA, architectures, targets) of the commands that would run, and all lines."""
        done = self.sh("bash", script, LONGSPAN_DRY_RUN="1", **switches)
        self.assertEqual(done.returncode, 0, done.stderr)
        cuda = re.search(r"would run: cmake .*-DLONGSPAN_CUDA=(\w+)", done.stdout)[1]
        named = re.search(r"would run: cmake .*-DLONGSPAN_CUDA_ARCHITECTURES=(\S+)", done.stdout)
        standard = re.search(r"would run: cmake .*-ULONGSPAN_CUDA_ARCHITECTURES", done.stdout)
        self.assertNotEqual(bool(named), bool(standard), done.stdout)
        targets = re.search(r"would run: cmake --build \S+ --target (.*)", done.stdout)[1]
        return (cuda, named[1] if named else "", targets), done.stdout

    @unittest.skipUnless(NO_GPU, "a GPU is here")
    def test_without_a_gpu_processors_only(self):
        for nvcc in (False, True):
            if nvcc:
                self.tool("nvcc", NEWEST)
            built, output = self.dry()
            self.assertEqual(built, ("OFF", "", "all"))
            self.assertIn("no NVIDIA GPU is seen: building for CPUs only", output)
            self.assertIn("LONGSPAN_CUDA=ON", output)
            self.assertIn("LONGSPAN_CUDA_ARCHITECTURES", output)

    @unittest.skipUnless(NO_GPU, "a GPU is here")
    def test_cuda_can_be_asked_for_without_a_gpu(self):
        self.tool("nvcc", NEWEST)
        self.assertEqual(self.dry(LONGSPAN_CUDA="ON")[0], ("ON", "", "all"))
        self.assertEqual(self.dry(LONGSPAN_CUDA_ARCHITECTURES="80-real;90a-real")[0],
                         ("ON", "80-real;90a-real", "all"))

    def test_a_gpu_gets_its_own_architecture(self):
        self.tool("nvcc", NEWEST)
        for capabilities, names in ((["8.0"], "80-real"), (["8.6"], "86-real"),
                                    (["8.9"], "89-real"), (["9.0"], "90a-real"),
                                    (["10.0"], "100-real"), (["10.3"], "103-real"),
                                    (["12.0"], "120-real"), (["12.1"], "121-real"),
                                    (["9.0", "9.0", "10.0", "8.0"], "80-real;90a-real;100-real"),
                                    (["7.5", "8.9"], "89-real")):
            self.gpus(*capabilities)
            built, output = self.dry()
            self.assertEqual(built, ("AUTO", names, "all"), capabilities)
            self.assertIn(f"building the CUDA part for {names} ", output)

    def test_a_gpu_that_nvcc_does_not_know(self):
        self.tool("nvcc", NVCC.format(release="12.8", known="80 86 89 90 100 120"))
        for capability, name in (("10.3", "100-real"), ("12.1", "120-real"), ("8.7", "86-real"),
                                 ("11.0", "100-virtual"), ("13.0", "120-virtual")):
            self.gpus(capability)
            self.assertEqual(self.dry()[0], ("AUTO", name, "all"), capability)

    def test_a_gpu_that_nothing_describes_gets_all_architectures(self):
        self.tool("nvcc", NEWEST)
        self.gpus()
        self.assertEqual(self.dry()[0], ("AUTO", "", "all"))

    def test_a_gpu_that_cannot_be_built_for(self):
        self.gpus("9.0")
        output = self.dry()[1]
        if not os.path.exists("/usr/bin/nvcc"):
            self.assertIn("nvcc was not found", output)
        self.tool("nvcc", NVCC.format(release="11.8", known="80 90"))
        built, output = self.dry()
        self.assertEqual(built, ("OFF", "", "all"))
        self.assertRegex(output, r"compute capability 9\.0\), but .*nvcc is 11\.8, and 12\.5 is needed")
        self.tool("nvcc", NEWEST)
        self.gpus("7.5")
        built, output = self.dry()
        self.assertEqual(built, ("OFF", "", "all"))
        self.assertIn("8.0 is the oldest", output)

    def test_the_switches_come_first(self):
        self.tool("nvcc", NEWEST)
        self.gpus("9.0")
        self.assertEqual(self.dry(LONGSPAN_CUDA="OFF")[0], ("OFF", "", "all"))
        self.assertEqual(self.dry(LONGSPAN_CUDA="ON")[0], ("ON", "90a-real", "all"))
        self.assertEqual(self.dry(LONGSPAN_CUDA_ARCHITECTURES="100")[0], ("ON", "100", "all"))
        self.assertIn("-B elsewhere", self.dry(LONGSPAN_BUILD_DIR="elsewhere")[1])
        wrong = self.sh(LONGSPAN_DRY_RUN="1", LONGSPAN_CUDA="maybe")
        self.assertEqual(wrong.returncode, 1)
        self.assertIn("LONGSPAN_CUDA is maybe", wrong.stderr)

    def carried(self, build, source):
        """A folder that looks like the build `build` of `source`, and a script's message about it."""
        folder = self.tools / "carried"
        folder.mkdir()
        cache = folder / "CMakeCache.txt"
        text = f"CMAKE_CACHEFILE_DIR:INTERNAL={build or folder}\nCMAKE_HOME_DIRECTORY:INTERNAL={source}\n"
        cache.write_text(text)
        done = self.sh(LONGSPAN_SKIP_SETUP="1", LONGSPAN_BUILD_DIR=str(folder))
        return done, cache.read_text(), text

    def test_a_build_that_was_carried_here_is_settled(self):
        done, found, _ = self.carried("/elsewhere/build", "/elsewhere")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n", found)
        self.assertNotIn("elsewhere", found)

    def test_the_build_of_another_checkout_is_left_alone(self):
        other = self.tools / "checkout"
        other.mkdir()
        (other / "CMakeLists.txt").touch()
        done, found, before = self.carried(None, other)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(f"is the build of {other}: run the script there", done.stderr)
        self.assertEqual(found, before)

    def test_the_demo_builds_the_command_alone(self):
        self.assertEqual(self.dry("./demo.sh")[0][2], "longspan_command")
        self.assertEqual(self.dry("./test.sh")[0][2], "all")

    def test_root_installs_what_is_missing_and_others_by_sudo(self):
        self.tool("dpkg-query", '[ "${!#}" = libfmt-dev ] || echo installed')
        self.tool("apt-get", 'echo "$*" >>"$LOG"; [[ $* != *libfmt-dev* ]] || exit 100')
        self.tool("sudo", 'echo "sudo $*" >>"$LOG"')
        self.tool("cmake", 'echo "cmake $*" >>"$LOG"; echo cmake version 3.25.1')
        self.assertIn("would install libfmt-dev", self.dry()[1])
        self.assertEqual(self.log.read_text(), "")
        for user, prefix in ((0, ""), (1000, "sudo env DEBIAN_FRONTEND=noninteractive apt-get ")):
            self.tool("id", f"echo {user}")
            done = self.sh(LONGSPAN_CUDA="OFF")
            called = self.log.read_text().splitlines()
            self.log.write_text("")
            self.assertTrue(called[0].startswith(prefix) and called[0].endswith("update"), called)
            self.assertTrue(called[1].startswith(prefix), called)
            self.assertRegex(called[1], "install -y --no-install-recommends libfmt-dev$")
            if user == 0:  # its apt-get fails: the package is named, and nothing is built
                self.assertEqual(done.returncode, 1)
                self.assertIn("cannot install libfmt-dev (fmt: text)", done.stderr)
                self.assertNotIn("cmake", "".join(called))
            else:
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(called[-1], "cmake --build build/default --target all")
        self.tool("dpkg-query", "echo installed")
        self.dry()
        self.assertEqual(self.log.read_text(), "")


@unittest.skipUnless(shutil.which("cmake"), "there is no CMake")
class PipTest(StandInTest):
    """The choice that python/CMakeLists.txt makes, by the file that it includes."""

    def choice(self, *defined, **switches):
        """(LONGSPAN_CUDA, architectures) that the library is configured with, and all lines."""
        script = self.tools / "choice.cmake"
        script.write_text(f"include({ROOT}/cmake/choose_cuda.cmake)\n"
                          'message("chosen ${LONGSPAN_CUDA} (${LONGSPAN_CUDA_ARCHITECTURES})")\n'
                          'message("asked anew ${chosen}")\n'
                          'message("without CUDA as ${LONGSPAN_WITHOUT_CUDA}")\n'
                          'message("nvcc $ENV{CUDACXX}")\n')
        done = self.sh(shutil.which("cmake"), *(f"-D{d}" for d in defined), "-P", str(script),
                       **switches)
        output = done.stdout + done.stderr
        self.assertEqual(done.returncode, 0, output)
        return re.search(r"(?m)^chosen (\S*) \((.*)\)$", output).groups(), output

    @unittest.skipUnless(NO_GPU, "a GPU is here")
    def test_without_a_gpu_processors_only(self):
        self.tool("nvcc", NEWEST)
        chosen, output = self.choice()
        self.assertEqual(chosen, ("OFF", ""))
        self.assertIn("no NVIDIA GPU is seen: building for CPUs only. LONGSPAN_CUDA=ON", output)
        self.assertIn("without CUDA as no NVIDIA GPU was seen\n", output)
        self.assertIn("asked anew LONGSPAN_CUDA;LONGSPAN_CUDA_ARCHITECTURES\n", output)

    def test_a_gpu_gets_its_own_architecture(self):
        self.tool("nvcc", NEWEST)
        self.gpus("9.0", "8.0")
        chosen, output = self.choice()
        self.assertEqual(chosen, ("AUTO", "80-real;90a-real"))
        self.assertIn("without CUDA as \n", output)
        self.assertIn(f"nvcc {self.tools}/nvcc\n", output)

    def test_a_gpu_that_cannot_be_built_for(self):
        self.tool("nvcc", NEWEST)
        self.gpus("7.5")
        chosen, output = self.choice()
        self.assertEqual(chosen, ("OFF", ""))
        self.assertRegex(output, "without CUDA as .*8.0 is the oldest")

    def test_what_is_asked_for_comes_first(self):
        self.tool("nvcc", NEWEST)
        both = "80-real;90a-real"
        for defined, switches, wanted in (
                ([], {"LONGSPAN_CUDA": "ON"}, ("ON", "")),
                ([], {"LONGSPAN_CUDA_ARCHITECTURES": both}, ("ON", both)),
                (["LONGSPAN_CUDA=ON"], {}, ("ON", "")),
                (["LONGSPAN_CUDA=ON"], {"LONGSPAN_CUDA": "OFF"}, ("ON", "")),
                (["LONGSPAN_CUDA=OFF"], {"LONGSPAN_CUDA": "ON"}, ("OFF", "")),
                ([f"LONGSPAN_CUDA_ARCHITECTURES={both}"], {}, ("ON", both)),
                ([f"LONGSPAN_CUDA_ARCHITECTURES={both}"], {"LONGSPAN_CUDA_ARCHITECTURES": "100"},
                 ("ON", both))):
            with self.subTest(defined=defined, switches=switches):
                if wanted == ("ON", "") and not NO_GPU:
                    self.skipTest("a GPU is here")
                chosen, output = self.choice(*defined, **switches)
                self.assertEqual(chosen, wanted, output)
                for name in (d.split("=")[0] for d in defined):
                    self.assertNotRegex(output, rf"asked anew (.*;)?{name}(;.*)?\n")
        self.gpus("8.9")
        self.assertEqual(self.choice("LONGSPAN_CUDA=ON")[0], ("ON", "89-real"))
        self.tool("other_nvcc", NEWEST)
        other = str(self.tools / "other_nvcc")
        self.assertIn(f"nvcc {other}\n", self.choice(f"CMAKE_CUDA_COMPILER={other}")[1])
        with self.assertRaisesRegex(AssertionError, "LONGSPAN_CUDA is maybe, and can be"):
            self.choice("LONGSPAN_CUDA=maybe")

    def test_without_bash_processors_only(self):
        self.gpus("9.0")
        chosen, output = self.choice("LONGSPAN_BASH=NO")
        self.assertEqual(chosen, ("OFF", ""))
        self.assertIn("bash, which looks for a GPU, was not found: building for CPUs", output)
        self.assertEqual(self.choice("LONGSPAN_BASH=NO", LONGSPAN_CUDA="ON")[0], ("ON", ""))


class EnvTest(unittest.TestCase):
    """env.sh in a folder with a blank in its name, and the command built there."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.clone = self.folder / "my clone"
        self.tool = self.clone / "build/default/bin/longspan"
        self.tool.parent.mkdir(parents=True)
        self.tool.write_text("#!/bin/sh\necho found\n")
        self.tool.chmod(0o755)
        shutil.copy(ROOT / "env.sh", self.clone)
        (self.folder / "else").mkdir()
        (self.folder / "link.sh").symlink_to("my clone/env.sh")

    def shell(self, shell, script, folder, **switches):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LONGSPAN_", "OMPI_"))}
        return subprocess.run([*shell, script], cwd=folder, text=True, stdin=subprocess.DEVNULL,
                              env=env | {"PATH": "/usr/bin:/bin"} | switches, capture_output=True,
                              timeout=60)

    def test_it_finds_its_own_folder(self):
        shells = [["bash", "-euc"]] + ([["zsh", "-euc"]] if shutil.which("zsh") else [])
        for shell in shells:
            for folder, name in ((self.clone, "./env.sh"), (self.folder / "else", "../my clone/env.sh"),
                                 (self.folder, self.clone / "env.sh"), (self.folder, "./link.sh")):
                with self.subTest(shell=shell[0], name=name):
                    done = self.shell(shell, f"source '{name}'; longspan; echo $OMPI_MCA_rmaps_base_oversubscribe",
                                      folder)
                    self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "found\n1\n", ""))
        self.tool.parent.rename(self.clone / "bin")
        for where in (".", str(self.clone)):
            done = self.shell(shells[0], "source '../my clone/env.sh'; longspan", self.folder / "else",
                              LONGSPAN_BUILD_DIR=where)
            self.assertEqual(done.stdout, "found\n", done.stderr)

    def test_where_it_cannot_it_says_so(self):
        plain = [shutil.which("dash") or "sh", "-c"]
        if self.shell(plain, "echo $BASH_VERSION", self.folder).stdout != "\n":
            self.skipTest("sh is bash here")
        done = self.shell(plain, ". ./env.sh; longspan", self.clone)
        self.assertEqual((done.stdout, done.stderr), ("found\n", ""))
        done = self.shell(plain, ". '../my clone/env.sh'; echo $? $PATH", self.folder / "else")
        self.assertEqual(done.stdout, "1 /usr/bin:/bin\n")
        self.assertIn("go to the folder of env.sh", done.stderr)

    def test_run_in_place_of_sourced(self):
        done = self.shell(["bash", "-c"], "bash env.sh", self.clone)
        self.assertEqual(done.returncode, 1)
        self.assertIn("source ./env.sh", done.stderr)

    def test_a_command_that_is_not_built(self):
        self.tool.unlink()
        interactive = self.shell(["bash", "--norc", "-ic"], "source ./env.sh", self.clone)
        self.assertIn(f"{self.clone}/setup.sh builds it", interactive.stderr)
        self.assertEqual(self.shell(["bash", "-c"], "source ./env.sh", self.clone).stderr, "")


class ReferenceTest(unittest.TestCase):
    def test_its_main_page_names_every_header(self):
        settings = (ROOT / "docs/Doxyfile").read_text(encoding="utf-8")
        page = re.search(r"(?m)^USE_MDFILE_AS_MAINPAGE *= *(\S+)$", settings)[1]
        self.assertIn(page, re.search(r"(?m)^INPUT *= *(.*)$", settings)[1].split())
        named = re.findall(r"longspan/\w+\.hpp", (ROOT / page).read_text(encoding="utf-8"))
        headers = {"longspan/" + path.name.removesuffix(".in") for path in (ROOT / "src/longspan").glob("*.hpp*")}
        self.assertEqual(set(named), headers)


if __name__ == "__main__":
    unittest.main()
