"""Sphinx: `make docs` builds the site from the pages that docs/pages.py makes; it works without a network."""

project = "kvprobe"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "kvprobe"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
myst_fence_as_directive = []
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["torch"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
