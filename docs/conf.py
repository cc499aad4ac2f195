"""Sphinx: `make docs` builds the site from the pages that docs/pages.py makes; it works without a network."""

project = "kvprobe"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "kvprobe"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = []
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["torch"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
man_pages = [("manual", "kvprobe", "says why KV-cache offload is slow", "", 1)]  # build/man/kvprobe.1
html_static_path = ["static"]
html_css_files = ["wrap.css"]
html_show_copyright = False
