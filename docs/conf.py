"""Settings of the site: `scripts/docs` builds it from the pages that `stage.py` makes."""

import importlib.metadata
import re

from sphinx.domains.python import PyObject

project = "jddp"
author = "the authors of jddp"
copyright = ""  # Sphinx reads this name.
version = release = importlib.metadata.version("jddp")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

exclude_patterns = ["notebooks/download"]  # files, and no pages

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300  # seconds for one cell; on two idle cores all of a notebook takes 30
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_default_options = {"members": True, "member-order": "bysource"}
autoclass_content = "both"  # Arguments stand with the class or with its __init__.
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
default_role = "code"  # A docstring has single backticks around code.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # Attributes as a list: members with a docstring are there already.
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"jddp {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = "$ "


def mark_code(app, what, name, obj, options, lines):
    """Marks indented examples of a docstring as code, before napoleon reads its sections."""
    text = "\n".join(lines)
    lines[:] = re.sub(r"(^\S.*\n)\n(?= {4}\S)", r"\1\n::\n\n", text, flags=re.M).split("\n")


def as_rst(app, what, name, obj, options, lines):
    """Makes reStructuredText of a docstring: stars stay stars, and code may end inside a word."""
    is_code = False
    for i, line in enumerate(lines):
        is_code = line == "::" or (is_code and not re.match(r"\S", line))
        if not is_code:
            line = re.sub(r"(?<![\\`\w*])(\*{1,2})(?=\w)", r"\\\1", line)
            line = re.sub(r"(`[^`]+`)(\w)?", lambda x: x[1] + (f"\\ {x[2]}" if x[2] else ""), line)
        lines[i] = line


def shorten_defaults(app, what, name, obj, options, signature, annotation):
    """Shows a default that is an object as three dots."""
    return signature and re.sub(r"=\(?<.*?>\)?(?=[,)])", "=...", signature), annotation


def skip_fields(app, what, name, obj, skip, options):
    """Leaves out fields of named tuples, which the docstring of the class has."""
    return (getattr(obj, "__doc__", None) or "").startswith("Alias for field") or None


def setup(app):
    """Registers what Sphinx calls."""
    app.connect("autodoc-process-docstring", mark_code, priority=100)
    app.connect("autodoc-process-docstring", as_rst, priority=900)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-skip-member", skip_fields)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # Sphinx calls them variables.
