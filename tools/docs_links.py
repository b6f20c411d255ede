"""A hook of mkdocs: links from docs/ to other files of the checkout lead to the repository on the site."""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parent.parent
_OUTSIDE = re.compile(r"\]\(\.\./(?P<path>[^)#\s]+)")


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """The page's text, with `](../FILE)` as a link to FILE in the repository, where it must be a file."""

    def link(match):
        if page.file.src_path.count("/"):
            return match[0]  # of a page in a folder, "../" is docs/
        if not (ROOT / match["path"]).exists():
            raise PluginError(f"{page.file.src_path} links to {match['path']}, which does not exist")
        return f"]({config.repo_url}/blob/main/{match['path']}"

    return _OUTSIDE.sub(link, markdown)
