"""MkDocs hooks: files outside docs/ that are pages of the site too, and links between the two.

In the repository, links are relative paths to files. In the site, a link to a page leads to that page; a link to any other file
of the repository, which the site does not have, becomes plain text. A link to a file that does not exist stays, and fails the
strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages that are files outside docs/."""
    for page, source in config.extra["pages"].items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Make links between files of the repository links between pages."""
    pages: dict[str, str] = config.extra["pages"]
    here = page.file.src_uri
    source = pages.get(here, f"docs/{here}")
    page_of = {outside: uri for uri, outside in pages.items()}

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target:
            return found[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path in page_of or path.startswith("docs/"):
            uri = page_of.get(path, path.removeprefix("docs/"))
            return f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(here))}{anchor})"
        return text if (ROOT / path).exists() else found[0]

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
