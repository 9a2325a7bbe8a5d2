"""Starts `longspan run`, or another command with --json, and reads its record."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile

import records

MPIRUN = "mpirun --oversubscribe --bind-to none -np {ranks}"


def newest(path):
    """A program by its path in a build folder: of the newest build, or None."""
    found = [*records.ROOT.glob(f"build*/{path}"), *records.ROOT.glob(f"build/*/{path}")]
    return str(max(found, key=lambda file: file.stat().st_mtime)) if found else None


def find():
    """The newest build of the command, or the one on the PATH."""
    return newest("bin/longspan") or shutil.which("longspan")


def add_command(parser):
    parser.add_argument("--command", default=find(), help="path of longspan")


def add_arguments(parser):
    add_command(parser)
    parser.add_argument("--launcher", default=MPIRUN,
                        help="how ranks are started (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])


def parse(parser):
    args = parser.parse_args()
    if args.command is None:
        parser.error("longspan was not found; build it, or give its path with --command")
    return args


def environment():
    env = dict(os.environ)
    if os.geteuid() == 0:  # Open MPI needs both to run as root
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def run(command, arguments, ranks=1, launcher=MPIRUN, what=("run",)):
    """The JSON record of one `longspan run`, or of another command; one rank is started without the
    launcher."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.json"
        start = shlex.split(launcher.format(ranks=ranks)) if ranks > 1 else []
        line = [*start, command, *what, *map(str, arguments), "--json", str(path)]
        done = subprocess.run(line, env=environment(), capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(line)}\nended with status {done.returncode}:\n"
                             f"{done.stdout}{done.stderr}")
        return json.loads(path.read_text())
