"""Hooks of mkdocs for the documentation site (see ``mkdocs.yml``), run by ``make docs``.

- Pages that live elsewhere in the repository (``BROUGHT``) become pages of the site.
- A link that leads out of ``docs/`` becomes a link to the repository; a picture is copied. A broken link stays as it
  is, so that mkdocs reports it.
- A notebook becomes a page with its text, its code and the outputs stored in it.
- What is between ``<!-- only in the sources -->`` and ``<!-- end -->`` is left out.
- Formulas become MathML, which browsers draw without a script.
- Sphinx roles in docstrings become links to the reference; a public name without a docstring is reported.
"""

import ast
import json
import logging
import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BROUGHT = {
    "research/findings.md": "findings.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
REPOSITORY = "https://github.com/weince/weince"
PICTURES = (".svg", ".png")
FENCE = re.compile(r"(^```.*?^```\s*$)", re.DOTALL | re.MULTILINE)
DIAGRAM = re.compile(r"^```mermaid.*?^```", re.DOTALL | re.MULTILINE)
SOURCES_ONLY = re.compile(r"^<!-- only in the sources -->\n.*?^<!-- end -->\n", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
UNDOCUMENTED = re.compile(
    r'<h\d id="([\w.]+)" class="doc doc-heading">(?:(?!<h\d).)*?<div class="doc doc-contents[^"]*">\s*'
    r'(?:</div>|<div class="doc doc-children">)',
    re.DOTALL,
)
THIN = '<mspace width="0.17em"/>'
ROLE = re.compile(r":(?:class|func|mod|meth|attr):`~?([\w.]+)`")

log = logging.getLogger("mkdocs.plugins.weince")


def on_files(files: Files, config: Any) -> Files:
    """Bring in the pages and pictures from outside ``docs/``, and make pages of the notebooks."""
    for source, uri in BROUGHT.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            page = File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=_page(file.src_uri))
            files.append(page)
    for source in _pictures(files):
        files.append(
            File.generated(config, posixpath.join("assets", source), abs_src_path=str(ROOT / source))
        )
    return files


def on_config(config: Any) -> Any:
    """Replace notebooks in the navigation by the pages made from them."""
    config.nav = json.loads(json.dumps(config.nav).replace(".ipynb", ".md"))
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the site, and diagrams as links to GitHub."""
    where = _home(page.file.src_uri)

    def linked(found: re.Match[str]) -> str:
        before, path, anchor, after = found.groups()
        return before + _target(where, path, page.file.src_uri) + (anchor or "") + after

    # To draw a diagram, the site would have to load a script of megabytes; GitHub draws it.
    drawn = f"[The picture, as GitHub draws it]({REPOSITORY}/blob/main/{where})."
    parts = FENCE.split(DIAGRAM.sub(drawn, SOURCES_ONLY.sub("", markdown)))
    return "".join(part if part.startswith("```") else LINK.sub(linked, part) for part in parts)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Convert formulas to MathML; warn of a name without a docstring, which fails a strict build."""
    for name in UNDOCUMENTED.findall(html):
        log.warning(f"{page.file.src_uri}: {name} has no docstring")
    return FORMULA.sub(_mathml, html)


def _mathml(found: re.Match[str]) -> str:
    kind, formula = found.groups()
    made = convert(unescape(formula).strip(), display="block" if kind == "div" else "inline")
    return made.replace("<mi>log</mi>", f"{THIN}<mi>log</mi>{THIN}")  # TeX spaces a function's name


def _home(uri: str) -> str:
    """Path of a page's source in the repository."""
    brought = {to: source for source, to in BROUGHT.items()}
    return brought.get(uri, posixpath.join("docs", uri))


def _target(where: str, path: str, uri: str) -> str:
    """The link on the site for a link between files of the repository."""
    source = posixpath.normpath(posixpath.join(posixpath.dirname(where), path))
    if source in BROUGHT:
        source = posixpath.join("docs", BROUGHT[source])
    elif source.endswith(PICTURES) and not source.startswith("docs/") and (ROOT / source).is_file():
        source = posixpath.join("docs/assets", source)
    if source.startswith("docs/"):
        source = source.replace(".ipynb", ".md")
        return posixpath.relpath(source, posixpath.join("docs", posixpath.dirname(uri)))
    if not (ROOT / source).exists():
        return path
    kind = "tree" if (ROOT / source).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{source}"


def _pictures(files: Files) -> set[str]:
    """Pictures outside ``docs/`` that a page shows or links to."""
    found = set()
    for file in files.documentation_pages():
        where = posixpath.dirname(_home(file.src_uri))
        for _, path, _, _ in LINK.findall(file.content_string):
            source = posixpath.normpath(posixpath.join(where, path))
            if source.endswith(PICTURES) and not source.startswith("docs/") and (ROOT / source).is_file():
                found.add(source)
    return found


def _page(uri: str) -> str:
    """A notebook as Markdown."""
    notebook = json.loads((ROOT / "docs" / uri).read_text(encoding="utf-8"))
    parts = [_cell(cell) for cell in notebook["cells"]]
    name = posixpath.basename(uri)
    at = f"{REPOSITORY}/blob/main/docs/{uri}"
    parts.insert(1, f"This page is a notebook: [{name}]({at}). The tests run it.")
    return "\n\n".join(parts) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        return f'<img class="figure" alt="figure" src="data:image/png;base64,{picture}">'
    return f"```text\n{''.join(data['text/plain'])}\n```"


class Docstrings(griffe.Extension):
    """Prepares docstrings for the reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub(_reference, obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Show ``dcl_loss = functional(DCLLoss, "dcl_loss")`` as a function, which it is."""
        for name, made in list(mod.members.items()):
            if isinstance(made, griffe.Attribute) and str(made.value).startswith("functional("):
                mod.set_member(name, _function(mod, name, str(made.value)))


def _reference(found: re.Match[str]) -> str:
    """A link to a name if the reference has it, otherwise just the name."""
    name = found.group(1)
    return f'<autoref identifier="{name}" optional><code>{name}</code></autoref>'


def _function(mod: griffe.Module, name: str, made: str) -> griffe.Function:
    """The function that ``weince.losses.base.functional`` makes, with its docstring."""
    call = ast.parse(made, mode="eval").body
    assert isinstance(call, ast.Call)
    loss, _, *example = call.args
    called = ast.literal_eval(example[0]) if example else "torch.randn(4, 8), torch.randn(4, 8)"
    about = mod[loss.id].docstring.value.splitlines()[0]
    text = (
        f"{about} A function with the options of `{loss.id}` and of its call.\n\nExamples:\n"
        f"    >>> import torch\n    >>> from weince import {name}\n    >>> {name}({called}).shape\n    torch.Size([])"
    )
    kinds = griffe.ParameterKind
    parameters = griffe.Parameters(
        griffe.Parameter("z_i", annotation="Tensor", kind=kinds.positional_or_keyword),
        griffe.Parameter("z_j", annotation="Tensor | None", kind=kinds.positional_or_keyword, default="None"),
        griffe.Parameter("options", annotation="Any", kind=kinds.var_keyword),
    )
    return griffe.Function(
        name, parameters=parameters, returns="Tensor", docstring=griffe.Docstring(text), lineno=1, endlineno=1
    )
