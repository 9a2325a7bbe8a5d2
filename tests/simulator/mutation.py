#!/usr/bin/env python3
"""Shows that the simulator finds defects: compiles each mutant of mutants.py and runs the cases of
its kernels under schedules until one fails. Mutants that none finds then run under ThreadSanitizer.

    tests/simulator/mutation.py [--family F ...] [--names REGEX] [--schedules N] [--jobs J]
                                [--out FILE]
    tests/simulator/mutation.py --table FILE

Needs build/simulated, and build/simulated-tsan for the second half. A mutated file is in its own
folder, first among the include paths, so that the tree stays unchanged; only the instances of the
cases are compiled anew. Writes one line of JSON for each mutant.
"""

import argparse
import concurrent.futures
import json
import pathlib
import re
import shlex
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import mutants  # noqa: E402

ROOT = mutants.ROOT
CUDA = "kernels/cuda/"
KERNELS, EXCHANGE = "simulator_kernels_test", "simulator_exchange_test"
SMALL = "simulator_small_kernels_test"
LONGEST = 60  # characters of a report

DECODE = ["decode/instances/decode_bf16.cu", "decode/instances/decode_bf16_any16.cu"]
PORTABLE = ["portable/instances/portable_bf16.cu", "portable/instances/portable_bf16_any16.cu"]
SINGLE = ["portable/instances/fp32.cu", "portable/instances/fp32_any.cu"]
HOPPER = ["hopper/attend_sm90.cu"]
IN_ORDER = (["hopper/attend_sm90_fixed_order.cu"], KERNELS, "*in_order*")
MERGE = ["combine/merge.cu"]

# Of a family: the sources to compile anew, the program, and its cases.
FAMILIES = {
    "decode": (DECODE, KERNELS,
               "Decode/*:*Serve*decode_pages_of_16:*Serve*decode_packed*:*Serve*decode_draft*:"
               "*Serve*decode_long*:*Serve*decode_shares*:*Serve*decode_chunks:*Serve*decode_prefixes:"
               "*Behind*decode*:NewKeys*"),
    "mla": (["mla/instances/mla_bf16.cu", "mla/instances/mla_fp16.cu"], KERNELS, "*latent*"),
    "portable": (PORTABLE, KERNELS, "Portable/*:*Serve*portable_*"),
    "fp32": (SINGLE, KERNELS, "Single/*:*Serve*single*:*Serve*fp32_*"),
    "tf32": (["portable/instances/fp32_tf32.cu"], "gpu_tf32_test", "*"),
    "hopper": (HOPPER, KERNELS, "*Hopper*:*Serve*hopper*:*Behind*hopper*"),
    "arrivals": (HOPPER, "gpu_key_arrivals_test", "*"),
    "puts": (["exchange/put_rows.cu"], "gpu_put_rows_test", "*"),
    "beside": (["exchange/put_rows.cu"], "gpu_key_arrivals_test", "*"),
    "meeting": (["exchange/put_rows.cu", "combine/pack_outputs.cu"], "gpu_put_flags_test", "*"),
    "exchange": (["exchange/exchange.cu", "exchange/exchange_parts.cu", "dispatch/backend.cu"],
                 EXCHANGE, "*"),
    "gradients": (["gradients/instances/bf16.cu", "gradients/instances/fp32.cu"],
                  "simulator_backward_test", "*32*:*bf16*"),
    "gradients_hopper": (["hopper/gradients_sm90_plain.cu", "hopper/gradients_sm90_wide.cu"],
                         "simulator_backward_test", "*bf16*"),
    "merge": (MERGE, KERNELS, "Decode/*:Single/*:*Serve*portable_*:*Serve*fp32_*"),
}
# Where the file is more specific than the family.
FILES = {
    "attend.cu": (["dispatch/attend.cu"], "gpu_head_dims_test", "*Short*"),
    "attend_sm90_fixed_order.cuh": IN_ORDER,
    "attend_sm90_segments.cuh": IN_ORDER,
    "append.cu": (["cache/append.cu"], "gpu_append_test", "*"),
    "biases.cu": (["gradients/biases.cu"], "simulator_backward_test", "*biases*:*qq*"),
    "check_arrays.cu": (["cache/check_arrays.cu"], SMALL, "CheckSlots*"),
    "copy_keys.cu": (["cache/copy_keys.cu"], "gpu_copy_keys_test", "*"),
    "copy_keys.hpp": (["cache/copy_keys.cu"], "gpu_copy_keys_test", "*"),
    "digest.cu": (["cache/digest.cu"], SMALL, "Digest*"),
    "fold_plan.cuh": IN_ORDER,
    "fold_tree.cuh": (MERGE, "gpu_merge_states_test", "*Sinks*"),
    "gather.cu": (["cache/gather.cu"], SMALL, "*Gather*"),
    "geometry.hpp": (DECODE + PORTABLE[1:] + HOPPER, KERNELS, "*Serve*shares*"),
    "merge_outputs.cu": (["combine/merge_outputs.cu"], "gpu_merge_outputs_test", "*"),
    "move_keys.cu": (["cache/move_keys.cu"], "gpu_move_keys_test", "*"),
    "move_keys.hpp": (["cache/move_keys.cu"], "gpu_move_keys_test", "*"),
    "resume.cu": (["combine/resume.cu"], "gpu_state_in_test", "*"),
    "rotate.cuh": (["cache/append.cu", "cache/rotate_rows.cu"], "gpu_rotate_rows_test", "*"),
    "rotate_rows.cu": (["cache/rotate_rows.cu"], "gpu_rotate_rows_test", "*"),
    "row_terms.cu": (["gradients/row_terms.cu"], "gpu_gradient_kernels_test", "*Terms*:*Sinks*"),
    "rows.cu": (["cache/rows.cu"], "gpu_rows_test", "*"),
    "segments.cu": (["combine/segments.cu"], "gpu_segments_test", "*"),
    "store_state.cuh": (PORTABLE[:1] + SINGLE[:1], "gpu_state_in_test", "*"),
    "view.cuh": (DECODE[:1] + ["combine/splits.cpp", "dispatch/launch.cpp"] + MERGE, KERNELS, "Decode/*"),
}


def plan_of(mutant):
    return FILES.get(pathlib.Path(mutant.file).name) or FAMILIES.get(mutant.family)


class Build:
    def __init__(self, folder):
        self.folder = folder
        commands = json.loads((folder / "compile_commands.json").read_text())
        self.compile = {pathlib.Path(c["file"]).relative_to(ROOT).as_posix(): c for c in commands
                        if "/longspan.dir/" in c["command"]}

    def program(self, name):
        return self.folder / "tests" / ("gpu" if name.startswith("gpu_") else "simulator") / name

    def objects(self, mutant, sources, overlay):
        """Compiles the sources against the mutated file; None where that does not compile."""
        mutated = overlay / mutant.file
        mutated.parent.mkdir(parents=True, exist_ok=True)
        mutated.write_text(mutants.apply(mutant, (ROOT / mutant.file).read_text()))
        made = []
        for source in sources:
            name = CUDA + source
            command = self.compile[name]
            at = mutated if name == mutant.file else ROOT / name
            words = [w for w in shlex.split(command["command"]) if w != "ccache"]
            made.append(overlay / (source.replace("/", "_") + ".o"))
            words[words.index("-o") + 1] = str(made[-1])
            words[words.index("-c") + 1] = str(at)
            words.insert(1, f"-I{overlay}")
            done = subprocess.run(words, cwd=command["directory"], capture_output=True, text=True)
            if done.returncode != 0:
                print(done.stderr[-2000:])
                return None
        return made

    def link(self, name, objects, to):
        """The program with these objects before the library's own."""
        target = self.program(name).relative_to(self.folder).as_posix()
        command = subprocess.run(["ninja", "-t", "commands", "-s", target], cwd=self.folder,
                                 capture_output=True, text=True, check=True).stdout.strip()
        command = command.removeprefix(": && ").removesuffix(" && :")
        words = shlex.split(command)
        at = words.index("-o") + 1
        words[at] = str(to)
        words[at + 1:at + 1] = map(str, objects)
        subprocess.run(words, cwd=self.folder, check=True, capture_output=True)


def how(output):
    """What found it, from the output."""
    if "ThreadSanitizer" in output:
        return "race detector"
    if "nothing can go on" in output:
        return "deadlock"
    report = re.search(r"longspan's simulator: (.*)", output)
    if report:
        return "misuse: " + re.sub(r"\d+", "N", report.group(1))[:LONGEST]
    return "result" if "Failure" in output else "crash"


def schedules_until_found(program, cases, seed, count, limit_s):
    """(schedules, what found it), or (schedules that ran, None)."""
    environment = {"LONGSPAN_SIMULATED_SEED": str(seed), "LONGSPAN_SIMULATED_GPUS": "8",
                   "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=4"}
    command = ["env", *[f"{k}={v}" for k, v in environment.items()], "setarch", "-R", str(program),
               f"--gtest_filter={cases}", f"--gtest_repeat={count}"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           errors="replace")
    ends, lines, ran, found = time.monotonic() + limit_s, [], 0, False
    for line in job.stdout:
        lines = (lines + [line])[-400:]
        ran += line.startswith("[==========] Running")  # once for each repetition
        found = "This schedule again" in line or "SUMMARY: ThreadSanitizer" in line
        if found or time.monotonic() > ends:
            break
    job.kill()
    rest = job.communicate()[0] or ""
    text = "".join(lines) + rest
    if found or (job.returncode not in (0, -9) and ran > 0):
        return max(ran, 1), how(text)
    return ran, None


def judge(mutant, builds, options):
    plan = plan_of(mutant)
    result = {"name": mutant.name, "family": mutant.family, "breaks": mutant.breaks}
    if plan is None:
        return result | {"found": None, "why": "no case of the simulator's runs this kernel"}
    sources, program, cases = plan
    if not any(build.program(program).exists() for build in builds):
        return result | {"found": None, "why": f"{program} is not built"}
    if mutant.file.endswith(".cu") and mutant.file.removeprefix(CUDA) not in sources:
        sources = [*sources, mutant.file.removeprefix(CUDA)]
    for build, count in zip(builds, (options.schedules, 4)):
        if not build.program(program).exists():
            continue
        overlay = options.work / mutant.name / build.folder.name
        objects = build.objects(mutant, sources, overlay)
        if objects is None:
            return result | {"found": None, "why": "does not compile"}
        build.link(program, objects, overlay / "program")
        ran, found = schedules_until_found(overlay / "program", cases, options.seed, count,
                                           options.limit)
        result[build.folder.name] = ran
        for path in (*objects, overlay / "program"):
            path.unlink()
        if found:
            return result | {"found": found, "schedules": ran}
    return result | {"found": None}


def check_unmutated(chosen, builds, options):
    """A case that fails without a mutant finds nothing."""
    for program, cases in sorted({plan_of(m)[1:] for m in chosen if plan_of(m)}):
        path = builds[0].program(program)
        if not path.exists():
            continue
        _, found = schedules_until_found(path, cases, options.seed, options.schedules, 20)
        if found:
            sys.exit(f"{path} --gtest_filter={cases} fails without a mutant: {found}")


def table(results):
    """Markdown of a run's output."""
    lines = ["| mutant | what goes wrong | found by | schedules |", "|---|---|---|---|"]
    for result in results:
        by, count = result["found"], str(result.get("schedules", ""))
        if by is None:
            by = "not found" + (": " + result["why"] if "why" in result else "")
        elif by == "race detector":
            by, count = "ThreadSanitizer", f"{count}, and {result['simulated']} without it"
        if len(by) == len("misuse: ") + LONGEST:  # cut off where it was written
            by = by.rsplit(" ", 1)[0] + " …"
        breaks = result["breaks"].rstrip(".").replace("|", "\\|")
        lines.append(f"| `{result['name']}` | {breaks} | {by} | {count} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--family", nargs="*")
    parser.add_argument("--names", default="")
    parser.add_argument("--schedules", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=150, help="seconds for a mutant's cases")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "mutation.jsonl")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--table", type=pathlib.Path,
                        help="run nothing: print the table of this file, as in tests/simulator/mutants.md")
    options = parser.parse_args()
    if options.table:
        print(table(map(json.loads, options.table.read_text().splitlines())))
        return
    builds = [Build(folder) for folder in (ROOT / "build" / "simulated",
                                           ROOT / "build" / "simulated-tsan")
              if (folder / "compile_commands.json").exists()]
    if not builds:
        sys.exit("there is no build/simulated: cmake --preset simulated, and build gpu_tests")
    chosen = [m for m in mutants.MUTANTS
              if (not options.family or m.family in options.family)
              and re.search(options.names, m.name)]
    check_unmutated(chosen, builds, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as out, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        def one(mutant):
            began = time.monotonic()
            result = judge(mutant, builds, options)
            print(f"{time.monotonic() - began:5.0f} s  {mutant.name}: "
                  f"{result['found'] or 'NOT FOUND ' + result.get('why', '')} "
                  f"({result.get('schedules', '-')})", flush=True)
            return result
        for result in pool.map(one, chosen):
            out.write(json.dumps(result) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
