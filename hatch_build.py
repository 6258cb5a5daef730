"""Where the project lives: addresses for PyPI, from BRAINTRACE_REPOSITORY and BRAINTRACE_SITE.

PyPI shows README.md without the repository around it, so its relative links and pictures become
addresses. Without the variables (a checkout, a test) nothing is added, and links stay relative.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?P<path>(?![a-z]+:|#)[^)\s]+)\)")


def absolute(text: str, repository: str, ref: str) -> str:
    """Markdown whose links and pictures are found outside of the repository."""

    def moved(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}{match['text']}({repository}/{kind}/{ref}/{match['path']})"

    return _LINK.sub(moved, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text("utf-8")
        repository = os.environ.get("BRAINTRACE_REPOSITORY", "").rstrip("/")
        site = os.environ.get("BRAINTRACE_SITE", "")
        urls = {}
        if repository:
            text = absolute(text, repository, os.environ.get("BRAINTRACE_REF", "main"))
            urls |= {"Source": repository, "Issues": f"{repository}/issues"}
            urls["Changelog"] = f"{repository}/blob/main/CHANGELOG.md"
        if site:
            urls["Documentation"] = site
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls
