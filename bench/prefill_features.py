#!/usr/bin/env python3
"""What features of prefill cost on one GPU: `longspan run` beside itself without them.

    python3 bench/prefill_features.py --machine h200

A group is one case without and with features. Its runs take turns, round after round, each warmed up
with its own work (see rounds.py); a ratio of speeds is the median of the rounds' ratios.
Operations are 4 heads dim for each pair of a row and a key that it sees, so a window that took just
its share of the time of all keys would have the ratio 1, and so would a packed batch of uneven
lengths that ran like equal ones of the same work. The inputs' scores are of order 1: a cap of 50 is
never near, a cap of 2 nearly always. Records go to features-<machine>.jsonl after each
round.
"""

import argparse
import statistics

import longspan_command
import records
import rounds

FEATURE_TARGET = 0.85  # softcap and ALiBi, of the plain speed
WINDOW_TARGET = 0.8    # a time within 1.25 of the share of the pairs
LENGTHS_TARGET = 0.9   # of equal lengths
# (heads, kv_heads, dim, kv)
CASES = [(16, 16, 128, 16384), (32, 32, 64, 16384), (8, 8, 256, 16384)]
WINDOWED = (8, 8, 128, 65536)
WINDOW = 4096
PACKED = (32, 8, 128, 16384)
SEQUENCES = 16  # of lengths from 1 to the case's, in an order that is nobody's


def visible_pairs(length, causal, window=0):
    if not causal:
        return length * length
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


class Run:
    """One side: its options, what its record says, its work, and its times, one a round."""

    def __init__(self, case, causal, lengths, target=None, **feature):
        heads, kv_heads, dim, kv = case
        self.target, self.times = target, []
        pairs = sum(visible_pairs(n, causal, feature.get("window", 0)) for n in lengths)
        self.work = 4 * heads * dim * pairs
        even = len(set(lengths)) == 1
        self.shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": "bf16",
                      "batch": len(lengths), "tokens": kv, "kv_len": kv, "ranks": 1,
                      "causal": causal, "window": 0, "softcap": 0, "alibi": "none",
                      "lengths": "equal" if even else f"{min(lengths)} to {kv}"} | feature
        sizes = (["--kv", lengths[0], "--tokens", lengths[0], "--batch", len(lengths)] if even
                 else ["--lengths", *lengths])
        self.options = ["--heads", heads, "--kv-heads", kv_heads, "--dim", dim, "--dtype", "bf16",
                        *sizes, *(["--causal"] if causal else [])]
        for name, value in feature.items():
            self.options += [f"--{name}", value]

    def measure(self, args, checked):
        self.times.append(rounds.run_us(args, self.work, checked, self.options))

    def speeds(self):
        return [self.work / us / 1e6 for us in self.times]


class Group:
    """The first run is what the others are held against."""

    def __init__(self, name, runs, bench="features"):
        self.name, self.runs, self.bench = name, runs, bench

    def measure(self, args, number):
        for run in self.runs if number % 2 == 0 else reversed(self.runs):
            run.measure(args, number == 0)

    def records(self):
        plain, *others = self.runs
        for run in others:
            ratio = statistics.median(a / b for a, b in zip(run.speeds(), plain.speeds()))
            yield records.record(self.bench, run.shape, "TFLOP/s",
                                 round(statistics.median(run.speeds()), 1), peer=self.name,
                                 peer_value=round(statistics.median(plain.speeds()), 1),
                                 ratio=round(ratio, 3), target=run.target)

    def lines(self):
        return [text(record) for record in self.records()]


def uneven(most):
    """From 1 to `most` in equal steps, shuffled."""
    steps = [i * 7 % SEQUENCES for i in range(SEQUENCES)]
    return [1 + (most - 1) * step // (SEQUENCES - 1) for step in steps]


def equal(lengths):
    """As much causal work in as many tokens, as nearly as equal lengths can."""
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


def text(record):
    case = record["case"]
    asked = "" if record["target"] is None else f" of {record['target']:.2f}" + (
        "" if record["met"] else " NOT MET")
    feature = "".join(f" {name} {case[name]}" for name, none in
                      (("softcap", 0), ("alibi", "none"), ("window", 0), ("lengths", "equal"))
                      if case[name] != none)
    return (f"dim {case['dim']:>3} {case['heads']}/{case['kv_heads']} {case['kv_len']:>6} keys "
            f"{'causal' if case['causal'] else 'full':<7}{feature:<30}{record['ours']:7.1f} | "
            f"{record['peer']} {record['peer_value']:.1f} ratio {record['ratio']:.3f}{asked}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.add_arguments(parser, 3, 230)
    args = longspan_command.parse(parser)
    rounds.take_turns(args, "features", groups(args.shrink),
                      "# longspan TFLOP/s | without the feature")


if __name__ == "__main__":
    main()
