#!/usr/bin/env python3
"""Keeps forms that readers stumbled over out of the documentation, and out of the comments and docstrings
of the code. Each form is a pattern and what to write instead. In pages, code and generated text are
skipped; in code, everything but comments and docstrings. Spelling is codespell's (.codespellrc)."""

import ast
import io
import pathlib
import re
import sys
import tokenize

from links import page_names

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Dated records, which nobody rewrites.
LEFT_ALONE = ("tests/simulator/mutants.md", "CHANGELOG.md")
FOLDERS = ("src", "kernels", "comm", "launcher", "python", "bench", "examples", "tests", "cmake")

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
# `comment` is the group. Strings and numbers match too, so that a comment mark or a quote inside them is skipped.
CPP = re.compile(r"""R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"|(?<!\w)\d(?:'?[\w.])*
    |'(?:\\.|[^'\\\n])*'|(?P<comment>//[^\n]*|/\*.*?\*/)""", re.DOTALL | re.VERBOSE)
SHELL = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<!\S)(?P<comment>\#[^\n]*)""", re.DOTALL | re.VERBOSE)
CMAKE = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|(?P<comment>\#\[\[.*?\]\]|\#[^\n]*)""", re.DOTALL | re.VERBOSE)
LANGUAGES = {".cpp": CPP, ".hpp": CPP, ".h": CPP, ".cu": CPP, ".cuh": CPP, ".sh": SHELL, "run": SHELL,
             ".cmake": CMAKE, ".in": CMAKE, "CMakeLists.txt": CMAKE}
MARKS = re.compile(r"^[ \t]*(?:#+!?|//[/!]?<?|/?\*+)(?: |$)|\*/$", re.MULTILINE)


def blank(match):
    """As many lines, without words."""
    return "\n" * match.group(0).count("\n")


def python_comments(text):
    """(first line, text) of every comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if (isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and ast.get_docstring(node, clean=False) is not None):
            string = node.body[0]
            for line in range(string.lineno, string.end_lineno + 1):
                yield line, lines[line - 1].strip().strip('"')


def comments(name, text):
    """The comments and docstrings of a source on their own lines, with all else blank; None for a file of
    another kind."""
    name = pathlib.PurePath(name)
    language = LANGUAGES.get(name.suffix) or LANGUAGES.get(name.name)
    if name.suffix in (".py", ".pyi"):
        pieces = python_comments(text)
    elif language:
        pieces = ((text.count("\n", 0, match.start()) + 1, match["comment"])
                  for match in language.finditer(text) if match["comment"])
    else:
        return None
    lines = [""] * (text.count("\n") + 1)
    for first, piece in pieces:
        for line, words in enumerate(MARKS.sub("", piece).split("\n"), first - 1):
            lines[line] += words.strip() + " "
    return "\n".join(line.rstrip() for line in lines)


def findings(name, text):
    """(line, what was found, what to write) in a page, or in the comments of a source."""
    if name.endswith(".md"):
        text = CODE.sub(blank, GENERATED.sub(blank, text))
    else:
        text = re.sub(r"`[^`\n]*\n?[^`\n]*`", blank, comments(name, text) or "")
    # A form may cross the end of a line, but not that of a paragraph.
    words = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    return sorted((text.count("\n", 0, match.start() + 1) + 1, " ".join(match.group(0).split()), better)
                  for pattern, better, _ in FORMS for match in pattern.finditer(words))


def source_names():
    """Every source that has comments, by its path from the root, without files of builds."""
    paths = [path for pattern in ("*.sh", "CMakeLists.txt", ".ci/run") for path in ROOT.glob(pattern)]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    names = sorted(path.relative_to(ROOT) for path in paths)
    return [name.as_posix() for name in names if comments(name, "") is not None
            and not any(part.startswith(("build", "__pycache__")) for part in name.parts)]


def judge_the_judge():
    for pattern, _, example in FORMS:
        assert pattern.search(example), f"prose.py does not find: {example}"
    assert not findings("a.md", "It runs on a CPU.\n\n    processors\n\n`processor`\n")
    assert findings("a.md", "one\n\n```\nshall\n```\ntwo shall\n")[0][0] == 6
    for name, text, lines in [
            ("a.cpp", 'f("shall // shall", \'"\', R"x(// ")shall)x", 1\'000);  // it\'s\n\n'
             "/* one\n * it shall */\n", [4]),
            ("a.cuh", "/// Waits\n/// in\n///\n/// vain in\n/// vain.\nint shall;  ///< `shall`\n", [4]),
            ("a.py", '"""One.\n\n    It shall.\n"""\n\nx = """shall\n# shall"""  # shall\n', [3, 7]),
            ("a.sh", "#!/bin/sh\necho \"# shall\" '# shall' ${#shall}  # it's what\n# there is, and shall\n",
             [2, 3]),
            ("CMakeLists.txt", "# A processor's\nset(x \"# shall\") # shall\n", [1, 2])]:
        assert [line for line, _, _ in findings(name, text)] == lines, (name, findings(name, text))


def main():
    judge_the_judge()
    names = sys.argv[1:] or page_names() + source_names()
    names = [name for name in names if not name.startswith(LEFT_ALONE) and (ROOT / name).exists()]
    wrong = 0
    for name in names:
        for line, words, better in findings(name, (ROOT / name).read_text(encoding="utf-8")):
            wrong += 1
            print(f"{name}:{line}: \"{words}\": write {better}")
    pages = sum(name.endswith(".md") for name in names)
    print(f"prose: {pages} pages, {len(names) - pages} sources, {wrong} findings")
    return 1 if wrong or not names else 0


if __name__ == "__main__":
    sys.exit(main())
