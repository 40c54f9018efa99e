"""Settings of the documentation site. `make docs` builds it; nothing is fetched from a network, then or when it is read."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "building"), str(HERE.parent / "src")]

import shaped  # noqa: E402 (its place is known only now)

project = "shaped"
author = "The shaped authors"
copyright = "2026, the shaped authors"
release = version = shaped.__version__

extensions = ["myst_parser", "site_extension"]
exclude_patterns = ["building", "results"]
nitpicky = True
show_warning_types = True
highlight_language = "text"  # of indented blocks, which are commands and formulas
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4  # with the names that GitHub gives them

html_theme = "furo"
html_title = "shaped"
html_static_path = ["building/site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses from file://
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
