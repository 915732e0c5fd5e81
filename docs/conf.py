"""Configuration of the documentation site; ``make docs`` builds it."""

from sb3_td3x import __version__

project = "TD3X"
author = "TD3X developers"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"TD3X {__version__}"
exclude_patterns = ["build", "ablation/*/report.md"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autoclass_content = "both"
# Without a network the references to other projects stay plain text
intersphinx_mapping: dict[str, tuple[str, None]] = {}
