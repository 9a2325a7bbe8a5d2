#!/usr/bin/env python3
"""The cost of features of prefill on one GPU: `longspan run` beside itself without them.

    python3 bench/prefill_features.py --machine h200

A group is one case without and with features. Its runs take turns, round after round, each warmed up
with its own work (see rounds.py). A ratio of speeds is the median of the rounds' ratios. Operations
are 4 heads dim for each pair of a row and a key that it sees. So the ratio 1 means, for a window,
the time of its share of the keys; for a packed batch of uneven lengths, the speed of equal ones with
the same work. The inputs' scores are of order 1: a cap of 50 is never reached, a cap of 2 nearly
always. Records go to features-<machine>.jsonl after each round.
"""

import argparse

import longspan_command
import rounds
from prefill_runs import CASES, Group, Run

FEATURE_TARGET = 0.85  # softcap and ALiBi, of the plain speed
WINDOW_TARGET = 0.8    # a time within 1.25 of the share of the pairs
LENGTHS_TARGET = 0.9   # of equal lengths
WINDOWED = (8, 8, 128, 65536)
WINDOW = 4096
PACKED = (32, 8, 128, 16384)
SEQUENCES = 16  # of lengths from 1 to the case's, in a shuffled order


def uneven(most):
    """From 1 to `most` in equal steps, shuffled."""
    steps = [i * 7 % SEQUENCES for i in range(SEQUENCES)]
    return [1 + (most - 1) * step // (SEQUENCES - 1) for step in steps]


def equal(lengths):
    """The same causal work in the same tokens, as nearly as equal lengths allow."""
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    count = max(1, round(tokens * tokens / squares))
    return [round((squares / count) ** 0.5)] * count


def groups(shrink):
    found = []
    for *heads_and_dim, kv in CASES:
        case = (*heads_and_dim, max(2, kv // shrink))
        for causal in (False, True):
            def run(target=FEATURE_TARGET, **feature):
                return Run(case, causal, [case[-1]], target, **feature)
            runs = [run(), run(softcap=50), run(alibi="query")]
            if case[2] == 128 and causal:
                runs += [run(alibi="context"), run(None, softcap=50, alibi="query"),
                         run(None, softcap=2)]
            found.append(Group("longspan, plain", runs))
    *heads_and_dim, kv = WINDOWED
    case = (*heads_and_dim, max(2, kv // shrink))
    found.append(Group("longspan, all keys", [
        Run(case, True, [case[-1]]),
        Run(case, True, [case[-1]], WINDOW_TARGET, window=max(1, WINDOW // shrink))]))
    *heads_and_dim, kv = PACKED
    case = (*heads_and_dim, max(2, kv // shrink))
    lengths = uneven(case[-1])
    found.append(Group("longspan, equal lengths", [
        Run(case, True, equal(lengths)), Run(case, True, lengths, LENGTHS_TARGET)]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.add_arguments(parser, 3, 230)
    args = longspan_command.parse(parser)
    rounds.take_turns(args, "features", groups(args.shrink),
                      "# longspan TFLOP/s | without the feature")


if __name__ == "__main__":
    main()
