"""Draws the losses that main.py wrote:  python plot.py losses-1.csv losses-4.csv --out losses.svg"""

import argparse
import csv

import matplotlib.pyplot as plt

plt.rcParams |= {"svg.hashsalt": "longspan", "svg.fonttype": "none"}  # the same bytes each time, text as text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("files", nargs="+")
parser.add_argument("--out", default="losses.svg")
args = parser.parse_args()

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for number, path in enumerate(args.files):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    name = path.removesuffix(".csv").rpartition("-")[2]
    axes.plot([int(r["step"]) for r in rows], [float(r["loss"]) for r in rows], label=f"{name} rank{'s' * (name != '1')}",
              linewidth=5 - 3 * min(number, 1), alpha=0.5 + 0.5 * min(number, 1))
axes.set(xlabel="step", ylabel="loss")
axes.legend()
figure.savefig(args.out, metadata={"Date": None, "Creator": None})
