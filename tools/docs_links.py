"""A hook of mkdocs: links files outside of docs/ to the repository, and names of jgg to their reference."""

import os
import re
from pathlib import Path

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parent.parent
REVISION = os.environ.get("DOCS_REVISION", "main")  # the branch or tag that links to the repository lead to
_OUTSIDE = re.compile(r"\]\(\.\./(?P<path>[^)#\s]+)")
# also matches links, headings and blocks of code as wholes, so that names inside them are skipped
_NAME = re.compile(r"<(a|autoref|h\d|pre)\b.*?</\1>|<code>(?P<name>jgg\.[\w.]*\w)[^<]*</code>", re.DOTALL)
# sections of docstrings that fit on a line; mkdocs leaves them as plain text
_SECTION = re.compile(r"(<p>|\n)(Returns|Raises|Source): ")


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """Turns `](../FILE)` into a link to FILE in the repository; raises PluginError if there is no such file."""

    def link(match):
        if page.file.src_path.count("/"):
            return match[0]  # for a page in a folder, "../" is docs/ itself
        if not (ROOT / match["path"]).exists():
            raise PluginError(f"{page.file.src_path} links to {match['path']}, which does not exist")
        return f"]({config.repo_url}/blob/{REVISION}/{match['path']}"

    return _OUTSIDE.sub(link, markdown)


def on_page_content(html: str, *, page, config, files) -> str:
    """Turns names of jgg in code into links to the reference, if the reference has them.

    On pages of the reference it also makes one-line sections of docstrings into paragraphs.
    """

    def link(match):
        name = match["name"]
        if name is None:
            return match[0]
        return f'<autoref identifier="{name}" optional>{match[0]}</autoref>'

    html = _NAME.sub(link, html)
    if page.file.src_path.startswith("api/"):
        html = _SECTION.sub(lambda match: f"{'' if match[1] == '<p>' else '</p>'}<p><b>{match[2]}:</b> ", html)
    return html
