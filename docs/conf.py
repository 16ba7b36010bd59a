"""Sphinx's configuration of the site: `make docs`.

The source folder is the checkout, so that README, ARCHITECTURE and the pages of `docs/` link to each other by the same
paths as on a code host.
"""

import configparser
from pathlib import Path

_setup = configparser.ConfigParser(interpolation=None)
_setup.read(Path(__file__).resolve().parents[1] / "setup.cfg")

project = "Slotkeeper"
copyright = "the authors of Slotkeeper"
author = "the authors of Slotkeeper"
version = release = _setup["metadata"]["version"]

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "tests", "var"]
nitpicky = True

html_theme = "furo"
html_title = f"Slotkeeper {release}"
html_show_sourcelink = False

# Headings get the anchors that code hosts give them.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# A sentence of the Keep-a-Changelog form starts each release: "[1.0.0]" is a heading there, not a link.
suppress_warnings = ["myst.header"]
