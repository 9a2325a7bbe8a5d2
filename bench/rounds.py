"""Cases on one GPU that take turns, round after round, so that a chip limited by power or heat
treats all alike; the records are written after each round."""

import time

import longspan_command
import records

WARM_S, MEASURE_S = 0.15, 0.25  # of one side in one round
LEAST_ITERATIONS = 7


def add_arguments(parser, rounds, seconds, of_rounds=None):
    longspan_command.add_command(parser)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200")
    parser.add_argument("--rounds", type=int, default=rounds, help=of_rounds)
    parser.add_argument("--seconds", type=float, default=seconds,
                        help="begin no round that ends later")
    records.add_arguments(parser)
    parser.add_argument("--backend", default="cuda", choices=["cuda", "host"], help="for a try")
    parser.add_argument("--shrink", type=int, default=1, help="for a try: divides the keys")


def counts(work):
    """Calls to warm up and to measure, at 500 TFLOP/s."""
    seconds = work / 500e12
    return (min(max(3, round(WARM_S / seconds)), 2000),
            min(max(LEAST_ITERATIONS, round(MEASURE_S / seconds)), 100))


def run_us(args, work, checked, options):
    """Median time of `longspan run` with these options, of about `work` operations."""
    warmup, iterations = counts(work) if args.backend == "cuda" else (1, 3)
    run = longspan_command.run(args.command, [
        "--backend", args.backend, "--check", 4 if checked else 0, "--warmup", warmup,
        "--iterations", iterations, *options])
    if checked and not run["check"]["right"]:
        raise SystemExit(f"wrong result: {run}")
    return run["time_ms"]["median"] * 1000


def take_turns(args, bench, items, heading):
    """An item has measure(args, number of the round), records() and lines() for printing."""
    begin, found = time.monotonic(), []
    for number in range(args.rounds):
        spent = time.monotonic() - begin
        if number and spent * (number + 1) / number > args.seconds:
            print(f"# {number} of {args.rounds} rounds: {spent:.0f} s are spent")
            break
        for item in items:
            item.measure(args, number)
            if number == 0:
                for line in item.lines():
                    print("# first round:", line, flush=True)
        found = [r for item in items for r in item.records()]
        records.write(bench, args.machine, found, args.results)
    print(heading)
    for item in items if found else []:
        print("\n".join(item.lines()))
    missed = [r for r in found if r["met"] is False]
    print(f"# {time.monotonic() - begin:.0f} s; {len(missed)} targets not met")
