"""Size of the packages: lines of code and files of each room, and what is larger than agreed.

    python benchmarks/code_lines.py [platform/rayembed …]

A line of code has a token that is no comment and no part of a docstring.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGES = ("platform/rayembed", "platform/rayembed_extras", "platform/rayembed_papers")
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LONGEST, MOST_FILES = 420, 30


def code_lines(text):
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def main(packages):
    for package in map(Path, packages):
        lines, files = Counter(), Counter()
        paths = sorted(package.rglob("*.py"))
        for path in paths:
            room, text = path.relative_to(package).parts[0], path.read_text(encoding="utf-8")
            lines[room] += code_lines(text)
            files[room] += 1
            if (length := text.count("\n")) > LONGEST:
                print(f"{path}: {length} lines")
        for folder, number in Counter(path.parent for path in paths).items():
            if number > MOST_FILES:
                print(f"{folder}: {number} files")
        print(f"{package}: {sum(lines.values()):,} lines of code in {len(paths)} files")
        rooms = (f"{room} {number:,} in {files[room]}" for room, number in lines.most_common())
        print(f"  {', '.join(rooms)}")


if __name__ == "__main__":
    main(sys.argv[1:] or PACKAGES)
