"""Starts `bench_serving`, which measures our side of serving, and reads its lines."""

import json
import subprocess

import longspan_command


def find():
    """The newest build of it, or None."""
    return longspan_command.newest("bin/bench_serving")


def add_program(parser):
    parser.add_argument("--program", default=find(), help="path of bench_serving")


def parse(parser):
    args = parser.parse_args()
    if not args.program:
        parser.error("bench_serving was not found: configure with -DLONGSPAN_BUILD_BENCH=ON and "
                     "build it, or name it with --program")
    return args


def run(command, *arguments):
    """The JSON lines of bench_serving with right results; the others are reported."""
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    good = [line for line in lines if "error" not in line and line.get("right") is not False]
    for line in lines:
        if line not in good:
            print(f"# NOT RIGHT: {json.dumps(line)}", flush=True)
    if done.stderr or (done.returncode != 0 and len(good) == len(lines)):
        print(f"# {command} {' '.join(arguments)}: status {done.returncode}: {done.stderr.strip()}",
              flush=True)
    return good
