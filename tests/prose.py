#!/usr/bin/env python3
"""Keeps forms out of the documentation that readers stumbled over. Each is a pattern and what to write
instead; code, and what is generated, is left alone. Spelling is codespell's (.codespellrc)."""

import pathlib
import re
import sys

from links import page_names

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Dated records, which nobody rewrites.
LEFT_ALONE = ("tests/simulator/mutants.md", "CHANGELOG.md")

# (pattern, what to write, an example that it must find)
FORMS = [
    (r"(?i:\bprocessors?\b)", "CPU, CPUs", "runs on processors"),
    (r"\bthat there (is|are) not\b", "a missing …, a failed …", "memory that there is not"),
    (r"\b(that|which|two things that) (is|are) none\b", "are false, are not any", "reports two things that are none"),
    (r"\b(that|which|who|what) (is|are) no (?!longer|more\b)[a-z]+", "is not a …", "entries that are no page"),
    (r"\b(is|are|was|were|be) said\b(?! to\b)", "is printed, is reported", "the reason is said too"),
    (r"\bshall\b", "will, must", "the rank that shall have it"),
    (r"\b(for|of|with|by|than|from|to) who\b", "the rank that …", "Nobody waits for who cannot come"),
    (r"(?:^|[.:;(] )Who (?!are|the\b|owns|is)[a-z]+s\b(?!.*\?)", "A rank that …", "Who waits there may wait"),
    (r"\bmeans? by (a|the|one|that) run\b", "describes a run", "What ranks mean by a run is compared"),
    (r"\bcounts? \*?\w+\*? (at each \w+ )?one up\b", "increments", "a sender counts *here* at each receiver one up"),
    (r"\b(stands?|stood) (once|twice)\b", "is written once", "What stood twice stands once"),
    (r"\bof so many\b", "the size of, N", "nodes of so many"),
    (r"\b(would|could|must|may) else\b", "otherwise", "which would else come first"),
    (r"\bin vain\b", "without success, until the deadline", "who waits in vain"),
    (r"\band (its|their) kin\b", "and the like", "dist.NAME.np4 and its kin"),
    (r"\b(lets?|let) go of\b", "releases", "a rank lets go of a layer"),
    (r"\b(is|are) mended\b", "is fixed", "a finding is mended"),
    (r"\bwhat there is\b", "what exists, what works", "says what there is"),
    (r"\bsaid of\b", "reported for", "what is said of a run"),
    (r"\bthe one and the other\b", "both", "take the one and the other"),
    (r"\bby whichever\b", "however", "by whichever way it is known"),
    (r"\b(those|they|it|these) (do|does|has|have) not do\b", "unsupported", "what they do not do"),
    (r"\bwhat a device's\b", "unsupported features", "what a device's kernels do not do they refuse"),
    (r"\bthis puts (it|this) on the PATH\b", "sets PATH", "this puts it on the PATH"),
]
FORMS = [(re.compile(pattern, re.MULTILINE), better, example) for pattern, better, example in FORMS]
GENERATED = re.compile(r"(<!-- \w+: [^\n]+ -->\n).*?(<!-- end -->)", re.DOTALL)
CODE = re.compile(r"^```.*?^```$|^(?:    [^\n]*\n)+|`[^`\n]*`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)


def blank(match):
    """As many lines, without words."""
    return "\n" * match.group(0).count("\n")


def findings(text):
    """(line, what was found, what to write) in the prose of a page."""
    text = CODE.sub(blank, GENERATED.sub(blank, text))
    found = []
    for pattern, better, _ in FORMS:
        for match in pattern.finditer(text):
            words = " ".join(match.group(0).split())
            found.append((text.count("\n", 0, match.start() + 1) + 1, words, better))
    return sorted(found)


def judge_the_judge():
    for pattern, _, example in FORMS:
        assert pattern.search(example), f"prose.py does not find: {example}"
    assert not findings("It runs on a CPU.\n\n    processors\n\n`processor`\n")
    assert findings("one\n\n```\nshall\n```\ntwo shall\n")[0][0] == 6


def main():
    judge_the_judge()
    names = sys.argv[1:] or page_names()
    pages = [name for name in names if not name.startswith(LEFT_ALONE) and (ROOT / name).exists()]
    wrong = 0
    for name in pages:
        for line, words, better in findings((ROOT / name).read_text(encoding="utf-8")):
            wrong += 1
            print(f"{name}:{line}: \"{words}\": write {better}")
    print(f"prose: {len(pages)} pages, {wrong} findings")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
