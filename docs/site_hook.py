"""For mkdocs: the repository's own pages on the site, and links between them and the pages of docs/.

README.md links to `docs/data.md`, and docs/experiments.md to `../README.md`: right on a code host, nowhere on a site
whose root is docs/. Both are pointed at the pages they mean. A link to what does not exist stays, and fails a strict
build.
"""  # noqa: E501

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
WIDE = ("results.md", "results_96.md")
"""Pages whose tables need the place of the list of contents."""
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands outside of docs/."""
    for name in (*PAGES, *FILES):
        files.append(File.generated(config, f"{FOLDER}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the place that their target has on the site."""
    source = page.file.src_uri
    if source in WIDE:
        page.meta["hide"] = ["toc"]
    here = posixpath.dirname(source)
    # where the page is in the repository
    folder = "" if here == FOLDER else posixpath.join("docs", here)

    def pointed(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        if target in (*PAGES, *FILES):
            place = f"{FOLDER}/{target}"
        elif here == FOLDER and target.startswith("docs/"):
            place = target.removeprefix("docs/")
        else:
            return found[0]
        return found[1] + posixpath.relpath(place, here or ".")

    return LINK.sub(pointed, markdown)
