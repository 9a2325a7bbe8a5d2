#!/usr/bin/env python3
"""Starts ranks of which one fails, and judges the others' messages and the end of the job.

    faults.py MODE --mpirun mpirun --program dist_fault [--ranks 4] [--device host|cuda]
                   [--exchange peer-buffers|gather|ring|levels|heads|keys|backward|dq [--graph]]

The deadline of the ranks is short. That of this script is long, and passing it means a hang. With
--exchange the failure occurs in a run of a layer, without it in a collective.
"""

import argparse
import os
import re
import signal
import subprocess
import sys

DEADLINE_S = 4
LATE_S = 5 * DEADLINE_S  # the machine may have fewer cores than ranks, and other work
HANG_S = 100
SKIP = 77

# Mode: exit status of the job, what every survivor must print, and how many must print it. mpirun
# ends the job when the first rank fails, so a survivor may be ended before it can print: "some"
# requires at least one. Under --enable-recovery mpirun leaves them alone, and all must print it.
MODES = {
    "stop": (7, r"SAW rank={victim} step=states kind=7: .*Rank {victim} did not come to 'states'"),
    "stop-ring": (7, r"SAW rank={victim} step=ring kind=7: .*Rank {victim} did not come to 'ring'"),
    "kill": (137, None),
    "abort": (None, r"SAW rank={victim} step= kind=6: Rank {victim} gave up: k.npy is truncated"),
    "skip": (6, r"SAW rank={victim} .*kind=6: Rank {victim} waits at 'the end' while"),
    "differ": (2, r"ERR kind=2: 'heads' differs .*rank 0 has 32, rank {victim} has 16"),
    "start": (7, r"SAW rank=-1 step=start MPI kind=7"),
    "make": (7, r"SAW rank={victim} step=make the communicator kind=7"),
    "end": (None, None),
    "single": (2, r"ERR kind=2: MPI was initialised for MPI_THREAD_SINGLE, .*MPI_THREAD_FUNNELED"),
    "crowded": (8, r"ERR kind=8: No thread could be started for MPI"),
    "crowded-end": (0, None),
    "share": (4, r"ERR kind=4: Rank 0 and rank 1 would share one GPU"),
    "kill-late": (137, None),
    "length": (None, None),
}

# The message of a run of the layer instead. A rank that waits for a stream waits at 'attention'; a
# watchdog also knows the step of the collective.
STEP = "(?:attention|gather of states)"
LAYER = {
    "stop": (7, rf"SAW rank={{victim}} step={STEP} kind=7: Rank {{victim}} did not come to "
                rf"'{STEP}' within the deadline of {DEADLINE_S} s"),
}
# A rank that waits for the victim's keys names the step: keys that it did not send. A rank that waits
# for a stream does so at 'attention'.
RING_STEP = r"ring of keys, step (?:[23] of 3|1 of 1)"
RING = rf"(?:{RING_STEP}|attention)"
BACKWARD_STEP = r"backward, (?:agreement|ring of (?:keys|gradients), step \d of \d|(?:exchange|gather) of dq)"
# Every rank reports the same: the field, both values, and the ranks. The first of the two is the
# lowest rank that has come to this run: a late one is not known to it yet.
DIFFERS = {
    "differ": r"ERR kind=2: ('rows of q' differs) between ranks at '{step}'(: rank [0-2] has 4, "
              r"rank {victim} has 3)",
    "length": r"ERR kind=2: ('total_keys' differs) between ranks at '{step}'"
              r"(: rank [0-2] has 5000, rank {victim} has 4999)",
}


def expected(options):
    """Status of the job and the survivors' messages."""
    status, pattern = MODES[options.mode]
    if options.exchange in ("backward", "dq"):
        step = rf"(?:{BACKWARD_STEP}|attention)" if options.device == "cuda" else BACKWARD_STEP
        if options.mode == "differ":
            return 2, (rf"ERR kind=2: ('dout \(type\)' differs) between ranks at '{step}'"
                       r"(: rank [0-2] has fp32, rank {victim} has bf16)")
        if options.mode == "stop":
            return 7, (rf"SAW rank={{victim}} step={step} kind=7: .*Rank {{victim}} did not come to "
                       rf"'{step}' within the deadline of {DEADLINE_S} s")
        if options.recovery:
            return status, rf"SAW rank={{victim}} step={step} kind=[67]: .*Rank {{victim}} "
        return status, pattern
    if options.exchange:
        status, pattern = LAYER.get(options.mode, (status, pattern))
        if options.mode in DIFFERS:
            return 2, DIFFERS[options.mode].replace("{step}", STEP)
    if options.exchange == "ring":
        ring = RING if options.device == "cuda" else RING_STEP
        if options.mode == "stop":
            return 7, (rf"SAW rank={{victim}} step={ring} kind=7: .*Rank {{victim}} did not come to "
                       rf"'{ring}' within the deadline of {DEADLINE_S} s")
        if options.recovery:
            return status, rf"SAW rank={{victim}} step={ring} kind=[67]: .*Rank {{victim}} "
    if options.exchange in ("heads", "keys"):
        step = r"(?:exchange of (?:(?:rows and keys|results) by heads|keys and values)|attention)"
        why = r"did not come to" if options.mode == "stop" else ""
        return status, rf"SAW rank={{victim}} step={step} kind=[67]: .*Rank {{victim}} {why}"
    if options.exchange == "levels":  # ranks that wait for the victim indirectly learn of it, too
        step = r"(?:exchange of (?:keys|values|queries|results)|ring of keys, step 1 of 1|attention)"
        why = r"did not come to" if options.mode == "stop" else ""
        return status, rf"SAW rank={{victim}} step={step} kind=[67]: .*Rank {{victim}} {why}"
    if options.recovery and options.mode in ("kill", "kill-late"):
        # A rank may die after its last word, so that the others see it only at the next step.
        steps = rf"(?:{STEP}|the end)" if options.exchange else "states"
        pattern = rf"SAW rank={{victim}} step={steps} kind=[67]: .*Rank {{victim}} "
    return status, pattern


def processes(session):
    """The states of the processes of a job that hangs: a stopped one is T, a dead one Z."""
    try:
        return subprocess.run(["ps", "-s", str(session), "-o", "pid,ppid,stat,wchan:24,args"],
                              capture_output=True, text=True).stdout
    except OSError as error:
        return f"ps: {error}"


def run(command, environment, again=True):
    """The exit status and all output; SKIP status stays. A hang is ended and reported as None."""
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = job.communicate(timeout=HANG_S)
        return job.returncode, output
    except subprocess.TimeoutExpired:
        listed = processes(job.pid)
        print(listed)
        # Ended ranks do not hang: mpirun, at times, sleeps through the end of one.
        states = [line.split()[2][0] for line in listed.splitlines()[1:]
                  if line.split()[0] != str(job.pid)]
        if again and states and all(state == "Z" for state in states):
            print("every rank has ended, and mpirun waits for them: started once more")
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
            return run(command, environment, again=False)
        job.send_signal(signal.SIGTERM)  # mpirun then ends its ranks, stopped ones too
        try:
            output, _ = job.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
        return None, output


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--mpirun", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="host")
    parser.add_argument("--exchange", choices=["peer-buffers", "gather", "ring", "levels", "heads", "keys", "backward", "dq"],
                        help="of a layer")
    parser.add_argument("--graph", action="store_true", help="the layer's runs are replays")
    parser.add_argument("--recovery", action="store_true", help="mpirun leaves survivors alone")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of mpirun")
    options = parser.parse_args()

    victim = options.ranks - 1
    status, pattern = expected(options)
    command = [options.mpirun, *options.flags, "-np", str(options.ranks)]
    if options.recovery:
        command.append("--enable-recovery")
    environment = dict(os.environ, LONGSPAN_DEADLINE_S=str(DEADLINE_S))
    if options.mode == "share":
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    words = [options.mode, options.device]
    if options.exchange:
        words += [options.exchange, "graph" if options.graph else "eager"]
    found, output = run([*command, options.program, *words], environment)
    # Under --enable-recovery mpirun's own status is not a rank's.
    if found == SKIP or (found is not None and "Skipped: " in output):
        print(output)
        return SKIP

    wrong = []
    if found is None:
        wrong.append(f"the job hung for {HANG_S} s")
    elif not options.recovery and status is not None and found != status:
        wrong.append(f"the job ended with status {found}, not {status}")
    if pattern:
        lines = re.findall(pattern.format(victim=victim), output)
        found_lines = len(lines)
        wanted = options.ranks - 1 if options.recovery else 1
        if found_lines < wanted:
            wrong.append(f"{found_lines} of {options.ranks - 1} survivors said what they saw")
        others = [line for line in re.findall(r"(?:SAW|ERR) .*", output)
                  if not re.search(pattern.format(victim=victim), line)
                  and "ERR kind=3: k.npy" not in line]
        if others:
            wrong.append(f"some saw something else: {others}")
        if options.exchange and options.mode in DIFFERS and len(set(lines)) > 1:
            wrong.append(f"ranks say different things: {sorted(set(lines))}")

    late = [float(s) for s in re.findall(r"AFTER ([0-9.]+) s", output) if float(s) > LATE_S]
    if late:
        wrong.append(f"with a deadline of {DEADLINE_S} s some took {late} s to see it")

    if wrong:
        print(output)
    for line in wrong:
        print("FAILED:", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
