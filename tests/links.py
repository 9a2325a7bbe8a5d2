#!/usr/bin/env python3
"""Checks every link of the documentation that stays in the repository: the file exists, and so does the
anchor, named as GitHub names headings. Pages under docs/ must be reachable from README.md."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[(?:[^][]|\[[^][]*\])*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")


def page_names():
    """Every page of the sources, by its path from the root, without files of builds."""
    names = (path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.md")))
    return [name.as_posix() for name in names if name.parts[0] == ".github"
            or not name.parts[0].startswith(("build", "."))]


def prose(text):
    """A page without its code: fenced blocks and code in a line."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text):
    """The anchors of a page's headings."""
    found, seen = set(), {}
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.+?) *$", plain, re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def broken(page, link, pages):
    """Why a link of a page leads nowhere; None for a valid one. `pages` are texts by path from the root."""
    if re.match(r"[a-z]+:", link):
        return None
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    try:
        path = target.resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return "leads out of the repository"
    if not target.exists():
        return "no such file"
    if anchor and path in pages and anchor not in anchors(pages[path]):
        return "no such heading"
    return None


def links(text):
    return LINK.findall(prose(text))


def reachable(pages, begin):
    """The pages that links lead to from one of them."""
    seen, todo = set(), [begin]
    while todo:
        page = todo.pop()
        if page in seen or page not in pages:
            continue
        seen.add(page)
        for link in links(pages[page]):
            if not re.match(r"[a-z]+:", link) and link.partition("#")[0]:
                target = ((ROOT / page).parent / link.partition("#")[0]).resolve()
                target = target / "README.md" if target.is_dir() else target
                if target.is_relative_to(ROOT):
                    todo.append(target.relative_to(ROOT).as_posix())
    return seen


def judge_the_judge():
    assert anchors("# A `b` of C, d\n```\n# no\n```\n# x\n# x\n## [y](z) z\n") == {"a-b-of-c-d", "x", "x-1", "y-z"}
    assert links("[a](b.md#c) `[no](no)` ![p](q.svg)\n```\n[no](no)\n```\n") == ["b.md#c", "q.svg"]
    text = {"README.md": "# one\n"}
    assert broken("README.md", "#two", text) and broken("README.md", "no.md", text)
    assert broken("docs/x.md", "../../out.md", text) and not broken("docs/x.md", "../README.md#one", text)


def main():
    judge_the_judge()
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in page_names()}
    wrong = count = 0
    for page, text in sorted(pages.items()):
        for link in links(text):
            count += 1
            why = broken(page, link, pages)
            if why:
                wrong += 1
                print(f"{page}: {link}: {why}")
    for page in sorted(page for page in set(pages) - reachable(pages, "README.md") if page.startswith("docs/")):
        wrong += 1
        print(f"{page}: no link leads to it from README.md")
    print(f"links: {len(pages)} pages, {count} links, {wrong} wrong")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
