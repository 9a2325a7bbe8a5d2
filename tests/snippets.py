#!/usr/bin/env python3
"""Documentation shows code that is compiled and run, and output that was printed.

    <!-- code: examples/02_mpi_host/main.cpp layer -->     lines between // [layer] and // [/layer]
    <!-- output: longspan run --list-strategies -->        what this build's command prints

Each such comment in a .md file is followed by a fenced block, which must be equal to what it names.
`--write` makes them equal; without it a difference is an error. `--bin DIR` is where the command is;
without it output blocks are left alone.
"""

import argparse
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- (code|output): (.+?) -->\n```\w*\n)(.*?)(```)", re.DOTALL)


def code(source, name):
    """The lines of a source file between the marks // [name] and // [/name], unindented."""
    text = (ROOT / source).read_text(encoding="utf-8")
    match = re.search(rf"^ *// \[{name}\]\n(.*?)^ *// \[/{name}\]\n", text, re.DOTALL | re.MULTILINE)
    if not match:
        raise SystemExit(f"{source} has no part // [{name}] ... // [/{name}]")
    return textwrap.dedent(match.group(1))


def output(command, folder):
    words = shlex.split(command)
    words[0] = str(folder / words[0])
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--bin", type=pathlib.Path)
    options = parser.parse_args()

    blocks, wrong = 0, 0
    for path in sorted(ROOT.rglob("*.md")):
        if path.relative_to(ROOT).parts[0].startswith(("build", ".")):
            continue
        text = path.read_text(encoding="utf-8")

        def current(match):
            nonlocal blocks
            head, kind, what, body, tail = match.groups()
            if kind == "output" and not options.bin:
                return match.group(0)
            blocks += 1
            return head + (code(*what.split()) if kind == "code" else output(what, options.bin)) + tail

        expected = BLOCK.sub(current, text)
        if expected == text:
            continue
        wrong += 1
        print(f"{path.relative_to(ROOT)}: {'rewritten' if options.write else 'out of date'}")
        if options.write:
            path.write_text(expected, encoding="utf-8")
    print(f"snippets: {blocks} blocks, {wrong} files {'rewritten' if options.write else 'out of date'}")
    return 0 if options.write or not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
