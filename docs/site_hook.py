"""A hook of mkdocs: pages of the repository on the site, and links between them and docs/.

README.md links to `docs/data.md`, and docs/experiments.md to `../README.md`. Both are right on a
code host, but not on a site with the root docs/, so they are rewritten. Links to LOG.md, which is
not on the site, become plain text. A broken link stays, and fails a strict build.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
FILES = ("CITATION.cff", "LICENSE")
FOLDER = "project"
WIDE = ("results.md",)
"""Pages whose tables need the place of the list of contents."""
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")
LOG = re.compile(r"\[([^\]]+)\]\((?:\.\./)*LOG\.md\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/."""
    for name in (*PAGES, *FILES):
        files.append(File.generated(config, f"{FOLDER}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to the addresses of their targets on the site."""
    source = page.file.src_uri
    if source in WIDE:
        page.meta["hide"] = ["toc"]
    here = posixpath.dirname(source)
    # the folder of the page in the repository
    folder = "" if here == FOLDER else posixpath.join("docs", here)

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target in (*PAGES, *FILES):
            place = f"{FOLDER}/{target}"
        elif here == FOLDER and target.startswith("docs/"):
            place = target.removeprefix("docs/")
        else:
            return link[0]
        return link[1] + posixpath.relpath(place, here or ".")

    return LINK.sub(rewritten, LOG.sub(r"\1", markdown))
