"""Runs of prefill on one GPU that are compared with each other: the sides of a group take turns,
round after round, and a ratio of speeds is the median of the rounds' ratios.

Operations are 4 heads dim for each pair of a row and a key that it sees."""

import statistics

import records
import rounds

# (heads, kv_heads, dim, kv)
CASES = [(16, 16, 128, 16384), (32, 32, 64, 16384), (8, 8, 256, 16384)]


def visible_pairs(length, causal, window=0):
    if not causal:
        return length * length
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


class Run:
    """One side: its options, its part of the record, its work, and its times, one a round."""

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
    """The others are compared with the first run."""

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


def text(record):
    case = record["case"]
    asked = "" if record["target"] is None else f" of {record['target']:.2f}" + (
        " NOT MET" if record["met"] is False else "")
    feature = "".join(f" {name} {case[name]}" for name, none in
                      (("softcap", 0), ("alibi", "none"), ("window", 0), ("lengths", "equal"))
                      if case[name] != none)
    return (f"dim {case['dim']:>3} {case['heads']}/{case['kv_heads']} {case['kv_len']:>6} keys "
            f"{'causal' if case['causal'] else 'full':<7}{feature:<30}{record['ours']:7.1f} | "
            f"{record['peer']} {record['peer_value']:.1f} ratio {record['ratio']:.3f}{asked}")
