#!/usr/bin/env python3
"""Documentation shows compiled code, printed output, and measured figures. In a .md file

    <!-- code: examples/02_mpi_host/main.cpp layer -->     lines between // [layer] and // [/layer],
                                                           in Python # [layer] and # [/layer];
                                                           several names: one part after the other
    <!-- output: longspan run --list-strategies -->        what this build's command prints
    <!-- file: bench/results/demo-cpu.txt 1-2,10 -->       a file; with numbers, these of its lines
    <!-- records: host-cpu dim=64,128 -->                  a table of bench/results/host-cpu.jsonl
    <!-- table: longspan info --features --json -->        a table of JSON that this build prints
    <!-- options: longspan info --options --json -->       the same of options and arguments, with their meaning
    <!-- range: prefill-h200 ratio peer=cuDNN -->          the least and the greatest of a figure
    <!-- met: auto-cpu ranks=2 -->                         how many of the records that have a target meet it

stands before a fenced block (all but the first three end with <!-- end -->), which must be equal to
what the comment names. Words with = choose among records. The last two stand within a line, since
Markdown ends a paragraph where a line begins with a comment. `--write` makes them equal; without it a
difference is an error. `--bin DIR` is where the command is; without it, what comes from the command
is left alone.
"""

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- (code|output|file): (.+?) -->\n```\w*\n)(.*?)(```)", re.DOTALL)
TABLE = re.compile(r"(<!-- (records|table|options): (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PHRASE = re.compile(r"(<!-- (range|met): (.+?) -->)(.*?)(<!-- end -->)", re.DOTALL)


def code(source, *names):
    """The lines of a source file between the marks // [name] and // [/name], unindented."""
    return "\n".join(part(source, name) for name in names)


def part(source, name):
    text = (ROOT / source).read_text(encoding="utf-8")
    match = re.search(rf"^ *(?://|#) \[{name}\]\n(.*?)^ *(?://|#) \[/{name}\]\n", text, re.DOTALL | re.MULTILINE)
    if not match:
        raise SystemExit(f"{source} has no part // [{name}] ... // [/{name}]")
    return textwrap.dedent(match.group(1))


def lines_of(path, chosen="1-"):
    """The lines of a file that `2-4,9` chooses, counted from 1."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
    found = []
    for piece in chosen.split(","):
        first, dash, last = piece.partition("-")
        part_of_it = lines[int(first) - 1:int(last or len(lines)) if dash else int(first)]
        if not part_of_it:
            raise SystemExit(f"{path} has no lines {piece}")
        found += part_of_it
    return "".join(found)


def output(command, folder):
    words = shlex.split(command)
    words[0] = str(folder / words[0])
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def cell(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def chosen(name, choices):
    """The records of a file that KEY=VALUE[,VALUE...] choose, their metric and peer in the case."""
    path = ROOT / "bench" / "results" / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for row in rows:
        row["case"] = {**row["case"], "metric": row["metric"], "peer": row["peer"]}
    for choice in choices:
        key, values = choice.split("=", 1)
        rows = [row for row in rows if cell(row["case"].get(key)) in values.split(",")]
    if not rows:
        raise SystemExit(f"{path.relative_to(ROOT)} has no records with {' '.join(choices)}")
    return rows


def span(what):
    """`NAME FIGURE [KEY=VALUE...]`: from the least to the greatest, as text."""
    name, figure, *choices = shlex.split(what)
    values = [row[figure] for row in chosen(name, choices) if row[figure] is not None]
    ends = [f"{value:.2f}" if value < 2 else f"{value:.1f}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def met(what):
    """`NAME [KEY=VALUE...]`: how many of how many."""
    name, *choices = shlex.split(what)
    rows = [row for row in chosen(name, choices) if row["target"] is not None]
    return f"{sum(row['met'] for row in rows)} of {len(rows)}"


def records(what):
    """A table of measured records: what all cases share above it, what differs in its columns."""
    name, *choices = shlex.split(what)
    if not (ROOT / "bench" / "results" / f"{name}.jsonl").exists():
        return "\nNot measured yet.\n\n"
    rows = chosen(name, choices)
    keys = list(dict.fromkeys(key for row in rows for key in row["case"]))
    shared = [key for key in keys if len({cell(row["case"].get(key)) for row in rows}) == 1]
    columns = [key for key in keys if key not in shared]
    text = "\n" + ", ".join(f"{key} {cell(rows[0]['case'][key])}" for key in shared
                            if cell(rows[0]["case"][key])) + "\n\n"
    figures = ["ours", "peer_value", "ratio", "target", "met"]
    figures = [key for key in figures if any(row[key] is not None for row in rows)]
    head = [*columns, *(key.replace("peer_value", "theirs") for key in figures)]
    text += "| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|\n"
    for row in rows:
        line = [cell(row["case"].get(key)) for key in columns] + [cell(row[key]) for key in figures]
        text += "| " + " | ".join(line) + " |\n"
    commands = dict.fromkeys((row["command"], row["date"], row["commit"]) for row in rows)
    text += "\nMeasured with:\n\n"
    text += "".join(f"    {command}    # {date}, {commit}\n" for command, date, commit in commands)
    machines = dict.fromkeys(described(row["machine"]) for row in rows if row.get("machine"))
    text += "".join(f"\nOn {machine}.\n" for machine in machines)
    return text + "\n"


def described(machine):
    """A record's CPU, as a sentence's end."""
    text = f"{machine['cpu']}, {machine['cores']} cores"
    if machine.get("memory_gib"):
        text += f", {machine['memory_gib']} GiB"
    if machine.get("simd"):
        text += f"; longspan {machine['longspan']} with {machine['simd']}"
    if machine.get("pytorch"):
        text += f"; PyTorch {machine['pytorch']}"
        if machine.get("pytorch_simd"):
            text += f" with {machine['pytorch_simd']} ({machine['pytorch_math']})"
    if machine.get("memory_read_gb_s"):
        text += "; memory is read at " + ", ".join(
            f"{speed} GB/s with {threads} thread{'s' * (threads != '1')}"
            for threads, speed in machine["memory_read_gb_s"].items())
    return text


def table(command, folder):
    """A table of the objects that the command prints as JSON, a column for each key."""
    return table_of(json.loads(output(command, folder)))


def table_of(rows):
    keys = list(rows[0])
    text = "\n| " + " | ".join(keys) + " |\n" + "|---" * len(keys) + "|\n"
    for row in rows:
        text += "| " + " | ".join(cell(row[key]) for key in keys) + " |\n"
    return text + "\n"


def members(structure):
    """The type of each member of a structure, and its comment in the headers, after or before it."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src" / "longspan").glob("*.hpp")))
    body = re.search(rf"^struct {structure} {{\n(.*?)^}};", text, re.DOTALL | re.MULTILINE).group(1)
    found, ahead, last = {}, [], None
    for line in body.splitlines():
        behind = re.search(r"///<? ?(.*)", line)
        member = re.match(r"  ([\w:<>]+) (\w+)(?: = .*?)?;", line)
        if member:
            last = member.group(2)
            found[last] = (member.group(1), ahead + ([behind.group(1)] if behind else []))
            ahead = []
        elif behind and "///<" in line:
            found[last][1].append(behind.group(1))
        elif behind:
            ahead.append(behind.group(1))
        else:
            ahead = []
    return {name: (kind, " ".join(words)) for name, (kind, words) in found.items()}


def options(command, folder):
    """The table that the command prints, with each one's comment in the headers."""
    rows = json.loads(output(command, folder))
    for row in rows:
        structure, member = row["C++"].split("::")
        *groups, name = member.split(".")
        for group in groups:
            structure = members(structure)[group][0]
        row["meaning"] = members(structure)[name][1].replace("|", "\\|")
    return table_of(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--bin", type=pathlib.Path)
    arguments = parser.parse_args()

    blocks, wrong = 0, 0
    for path in sorted(ROOT.rglob("*.md")):
        if path.relative_to(ROOT).parts[0].startswith(("build", ".")):
            continue
        text = path.read_text(encoding="utf-8")

        def current(match):
            nonlocal blocks
            head, kind, what, body, tail = match.groups()
            if kind in ("output", "table", "options") and not arguments.bin:
                return match.group(0)
            blocks += 1
            made = {"code": lambda: code(*what.split()), "records": lambda: records(what),
                    "file": lambda: lines_of(*what.split()),
                    "output": lambda: output(what, arguments.bin),
                    "table": lambda: table(what, arguments.bin), "options": lambda: options(what, arguments.bin),
                    "range": lambda: span(what),
                    "met": lambda: met(what)}
            return head + made[kind]() + tail

        if re.search(r"^\s*<!-- (range|met):", text, re.MULTILINE):
            raise SystemExit(f"{path.relative_to(ROOT)}: a line begins with a range, or with what is met")
        expected = PHRASE.sub(current, TABLE.sub(current, BLOCK.sub(current, text)))
        if expected == text:
            continue
        wrong += 1
        print(f"{path.relative_to(ROOT)}: {'rewritten' if arguments.write else 'out of date'}")
        if arguments.write:
            path.write_text(expected, encoding="utf-8")
    print(f"snippets: {blocks} blocks, {wrong} files {'rewritten' if arguments.write else 'out of date'}")
    if wrong and not arguments.write:
        print("python3 tests/snippets.py --write --bin BUILD/bin brings them up to date")
    return 0 if arguments.write or not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
