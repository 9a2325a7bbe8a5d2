#!/usr/bin/env python3
"""Writes bench/results/*.csv, the tables for people, from the records beside them."""

import records

if __name__ == "__main__":
    for source in sorted(records.RESULTS.glob("*.jsonl")):
        source.with_suffix(".csv").write_text(records.table(records.read(source)))
