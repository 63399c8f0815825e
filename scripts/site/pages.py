"""Hook of mkdocs: pages of the repository outside docs/ become pages of the site, and links lead to them.

Links in docs/*.md and in README.md are those of the repository, where they work as well. What a link names that is no
page (a program, a table) becomes a page that shows the file. What cannot be found stays, and mkdocs warns of it.

Search of pages that were opened from a disk needs a script (iframe-worker 1.0.4, MIT) that the plugin `offline` would
take from the network: it is here, and the pages name this copy.
"""

from __future__ import annotations

import os
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
"""Path in the repository -> of the page, beside those of docs/."""
LINK = re.compile(r"""(\]\(|src=")([^)#"\s:]+)(?=[)#"])""")
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".md": "markdown"}
SHIM, OURS = "https://unpkg.com/iframe-worker/shim", "assets/javascripts/iframe-worker.js"
shown: dict[str, str] = {}


def page_of(path: str) -> str:
    """The page of the site for a file or folder of the repository; "" if there is none."""
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    if path in PAGES or path in shown:
        return PAGES.get(path) or shown[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).is_file() else ""


def targets(text: str, path: str) -> set[str]:
    """The paths in the repository to which a page of it has links."""
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), m[2])) for m in LINK.finditer(text)}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `PAGES`, and one for each file that a link of any page names."""
    folder = pathlib.Path(config.docs_dir)
    sources = [*PAGES, *(f"docs/{p.name}" for p in folder.glob("*.md"))]
    shown.clear()
    for source in sources:
        for path in targets((ROOT / source).read_text("utf-8"), source):
            if not page_of(path) and (ROOT / path).is_file():
                shown[path] = f"source/{path}.md" if not path.endswith(".md") else path
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text("utf-8")))
    shim = pathlib.Path(__file__).with_name("iframe-worker")
    for name, uri in (("shim.js", OURS), ("LICENSE", f"{OURS}.LICENSE")):
        files.append(File.generated(config, uri, content=(shim / name).read_text("utf-8")))
    for path, uri in shown.items():
        text = (ROOT / path).read_text("utf-8")
        if not path.endswith(".md"):
            text = f"# {path}\n\n````{LANGUAGES.get(pathlib.Path(path).suffix, 'text')}\n{text}````\n"
        made = File.generated(config, uri, content=text)
        made.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page from paths in the repository to pages of the site."""
    uri = page.file.src_uri
    source = next((path for path, u in {**PAGES, **shown}.items() if u == uri), f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        there = page_of(path)
        return match[1] + (os.path.relpath(there, posixpath.dirname(uri) or ".") if there else match[2])

    return LINK.sub(moved, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Name our copy of the script for searching from a disk."""
    return output.replace(SHIM, os.path.relpath(OURS, posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """The same for the page of missing pages, which stands at the root."""
    return output_content.replace(SHIM, f"/{OURS}") if template_name == "404.html" else output_content
