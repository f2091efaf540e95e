"""Build the documentation as a site: `python docs/site/build_site.py [FOLDER]`.

Stages the Markdown pages of the repository at their own paths, so that links between them hold in
both places, adds the generated reference, and runs Zensical, which refuses dead links.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import commands_reference
import python_reference
import settings_reference

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = ("docs", "cluster", "benchmarks", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", *(f"{folder}/**/*.md" for folder in FOLDERS))
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LOG = "benchmarks/log"
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter that keeps a page out of the site's search."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def build(folder: Path) -> Path:
    """The folder of the HTML pages, which is emptied first.

    Raises:
        SystemExit: Zensical refuses a page, such as one with a dead link.
    """
    shutil.rmtree(folder, ignore_errors=True)
    staged = folder / "pages"
    for page in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        _write(staged / page.relative_to(ROOT), page.read_text(encoding="utf-8"))
        _copy_linked(page, staged)
    (staged / "README.md").rename(staged / "index.md")
    reference = staged / "docs" / "reference"
    for name, text in settings_reference.pages().items():
        _write(reference / "settings" / name, text)
    _write(reference / "commands.md", commands_reference.page())
    _write(reference / "python.md", python_reference.page())
    for page in staged.rglob("*.md"):
        unsearched = UNSEARCHED if page.is_relative_to(staged / LOG) else ""
        _write(page, unsearched + _with_site_links(page, staged))
    shutil.copy(HERE / "extra.css", staged)
    shutil.copy(HERE / "zensical.toml", folder)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    done = subprocess.run(
        command,
        check=False,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _, _ = COLOURS.sub("", done.stdout).partition("Traceback")
    if done.returncode:
        sys.exit(printed)
    print(printed.strip())
    return folder / "html"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy_linked(page: Path, staged: Path) -> None:
    """Copy the files that a page links to and that are no pages, such as scripts and pictures."""
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / match[2]).resolve()
        if target.is_file() and target.suffix != ".md" and target.is_relative_to(ROOT):
            copy = staged / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copy)


def _with_site_links(page: Path, staged: Path) -> str:
    """The page with links as the site has them: README.md is the site's index, and a folder's link
    leads to its README.
    """

    def replace(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        target = (page.parent / match[2]).resolve()
        if target == staged / "README.md":
            target = staged / "index.md"
        elif target.is_dir() and (target / "README.md").is_file():
            target /= "README.md"
        return f"{match[1]}{os.path.relpath(target, page.parent)}{match[3] or ''}{match[4]}"

    return LINK.sub(replace, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    made = build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve())
    print(f"The documentation is in {made}; open {made / 'index.html'}")
