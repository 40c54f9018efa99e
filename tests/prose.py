"""One sentence a line in Markdown: `python tests/prose.py FILE.md …` rewrites files so, and test_documents.py checks them."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ABBREVIATION = r"(?<!e\.g\.)(?<!i\.e\.)(?<! al\.)(?<!Eq\.)(?<!Fig\.)(?<!Sec\.)(?<!App\.)(?<!Def\.)(?<!vs\.)"
END = re.compile(rf"(?:(?<=[.!?])|(?<=[.!?]\))){ABBREVIATION}\s+(?=[^\s\d–—=,;)a-z])")
LITERAL = re.compile(r"\s*(```|\||#|!\[|<!--|$)|    ")  # fences, tables, headings, pictures, marks, blank lines, code
ITEM = re.compile(r"(\s*(?:[-*]|\d+\.) )")
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"\]\([^)]*\)")


def paragraphs(text: str) -> Iterator[tuple[list[str], bool]]:
    """Runs of lines, and whether they are prose. Fenced code and generated blocks are not."""
    prose: list[str] = []
    until = ""
    for line in text.split("\n"):
        literal = bool(until) or (bool(LITERAL.match(line)) and not (prose and re.match(r" {4}\S", line)))
        if prose and (literal or ITEM.match(line)):
            yield prose, True
            prose = []
        if literal:
            yield [line], False
            mark = line.strip()
            if until:
                until = "" if mark.startswith(until) else until
            elif mark.startswith("```"):
                until = "```"
            elif mark.startswith("<!-- claims") and "<!-- end" not in mark:
                until = "<!-- end"
        else:
            prose.append(line)
    if prose:
        yield prose, True


def split_sentences(lines: list[str]) -> list[str]:
    """A line for each sentence; those of a list item are indented under it. Code stays on one line: `. .venv/bin/activate`."""
    item = ITEM.match(lines[0])
    first = item[1] if item else ""
    text = " ".join([lines[0][len(first) :].strip(), *(line.strip() for line in lines[1:])])
    sentences = END.split(CODE.sub(lambda found: found[0].replace(" ", "\0"), text))
    return [(" " * len(first) if number else first) + sentence.replace("\0", " ") for number, sentence in enumerate(sentences)]


def reflow(text: str) -> str:
    return "\n".join(line for lines, prose in paragraphs(text) for line in (split_sentences(lines) if prose else lines))


def find_long_lines(text: str, most: int) -> list[str]:
    """Prose lines with more characters than that, the addresses of links apart."""
    return [line for lines, prose in paragraphs(text) if prose for line in lines if len(LINK.sub("]", line)) > most]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(reflow(path.read_text()))
