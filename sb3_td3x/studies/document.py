"""A report as blocks, and these as HTML in one file and as Markdown beside its pictures."""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MIME = {".png": "image/png", ".gif": "image/gif"}

# Browsers hold the page to it: nothing is loaded, nothing runs
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# Figures have a white ground in both modes
_CSS = """
:root { color-scheme: light dark; --text: #1a1a1a; --soft: #595959; --ground: #fff; --line: #d4d4d4; --stripe: #f6f6f6;
  --link: #0056a3; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e4e4; --soft: #a8a8a8; --ground: #181a1b; --line: #3d4043;
  --stripe: #202325; --link: #7cb8f2; } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; color: var(--text); background: var(--ground);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.4rem; margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin: 1.75rem 0 .25rem; }
a { color: var(--link); }
code { font: .9em ui-monospace, "Liberation Mono", monospace; overflow-wrap: anywhere; }
nav ul { margin: .25rem 0; padding-left: 1.2rem; }
nav > ul { columns: 2; }
nav li { break-inside: avoid; }
figure { margin: 1rem 0 1.5rem; }
figure img { display: block; width: 100%; background: #fff; border-radius: 4px; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .35rem; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1rem; }
.gallery figure { margin: 0; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; }
td.text, th.text { text-align: left; }
td.long { white-space: normal; min-width: 16rem; }
tbody tr:nth-child(even) { background: var(--stripe); }
.note { color: var(--soft); font-size: .9rem; }
@media print { body { max-width: none; font-size: 10pt; } nav > ul { columns: 2; } figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } }
""".strip()


@dataclass(frozen=True)
class Heading:
    """
    :param text: plain text
    :param level: 2 for a section, 3 for a part of it
    """

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """
    :param text: plain text; what stands between backquotes is code
    """

    text: str


@dataclass(frozen=True)
class Bullets:
    """
    :param items: as of ``Paragraph``
    """

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """
    :param columns: headings
    :param rows: cells, as of ``Paragraph``
    :param n_text_columns: how many columns, from the left, are text; numbers stand to the right
    :param long: number of the column, if any, whose text may be broken into lines
    :param note: what is said below
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_text_columns: int = 1
    long: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """
    :param path: a PNG or GIF
    :param alt: what is seen, for who does not see it
    :param caption: as of ``Paragraph``
    """

    path: Path
    alt: str
    caption: str


@dataclass(frozen=True)
class Gallery:
    """
    Small pictures side by side.

    :param pictures: the pictures
    """

    pictures: Sequence[Picture]


Block = Heading | Paragraph | Bullets | Table | Picture | Gallery


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """
    :param title: of the report
    :param blocks: what it holds
    :return: a page that loads nothing: the pictures are inside
    """
    anchors = _anchors(blocks)
    body = [f"<h1>{html.escape(title)}</h1>"]
    contents = _html_contents(blocks, anchors)
    for idx, block in enumerate(blocks):
        if isinstance(block, Heading):
            # Before the first section stand the introduction's paragraphs
            if contents:
                body.append(contents)
                contents = ""
            body.append(f'<h{block.level} id="{anchors[idx]}">{html.escape(block.text)}</h{block.level}>')
        else:
            body.append(_html_block(block))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        # An empty icon, else browsers ask the folder's server for one
        f'<link rel="icon" href="data:,">\n<style>\n{_CSS}\n</style>\n</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def to_markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """
    :param title: of the report
    :param blocks: what it holds
    :param folder: where the report will be, for links to the pictures
    :return: the report for GitHub
    """
    parts = [f"# {title}", *(_markdown_block(block, folder) for block in blocks)]
    return "\n\n".join(parts) + "\n"


def _anchors(blocks: Sequence[Block]) -> dict[int, str]:
    """
    :param blocks: of a report
    :return: a name for each heading, by its index
    """
    return {idx: f"part-{idx}" for idx, block in enumerate(blocks) if isinstance(block, Heading)}


def _html_contents(blocks: Sequence[Block], anchors: dict[int, str]) -> str:
    """
    :param blocks: of a report
    :param anchors: names of its headings
    :return: the table of contents
    """
    items: list[str] = []
    level = 2
    for idx, anchor in anchors.items():
        block = blocks[idx]
        assert isinstance(block, Heading)
        if block.level > level:
            items.append("<ul>")
        elif block.level < level:
            items.append("</ul>")
        level = block.level
        items.append(f'<li><a href="#{anchor}">{html.escape(block.text)}</a></li>')
    items += ["</ul>"] * (level - 2)
    return f'<nav aria-label="Contents"><ul>{"".join(items)}</ul></nav>'


def _html_block(block: Block) -> str:
    """
    :param block: of a report, no heading
    :return: it in HTML
    """
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{_html_text(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Table):
        return _html_table(block)
    if isinstance(block, Picture):
        data = base64.b64encode(block.path.read_bytes()).decode()
        source = f"data:{_MIME[block.path.suffix]};base64,{data}"
        image = f'<img src="{source}" alt="{html.escape(block.alt)}">'
        return f"<figure>{image}<figcaption>{_html_text(block.caption)}</figcaption></figure>"
    if isinstance(block, Gallery):
        return '<div class="gallery">' + "\n".join(map(_html_block, block.pictures)) + "</div>"
    assert isinstance(block, Paragraph)
    return f"<p>{_html_text(block.text)}</p>"


def _html_table(table: Table) -> str:
    """
    :param table: a table
    :return: it in HTML
    """

    def cell(tag: str, idx: int, text: str) -> str:
        names = ["text"] * (idx < table.n_text_columns) + ["long"] * (idx == table.long)
        attribute = f' class="{" ".join(names)}"' if names else ""
        return f"<{tag}{attribute}>{_html_text(text)}</{tag}>"

    head = "".join(cell("th", idx, text) for idx, text in enumerate(table.columns))
    rows = "\n".join(f"<tr>{''.join(cell('td', idx, text) for idx, text in enumerate(row))}</tr>" for row in table.rows)
    note = f'<p class="note">{_html_text(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>{note}'


def _html_text(text: str) -> str:
    """
    :param text: plain text; what stands between backquotes is code
    :return: it in HTML
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _markdown_block(block: Block, folder: Path) -> str:
    """
    :param block: of a report
    :param folder: where the report will be
    :return: it in Markdown
    """
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return _markdown_text(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_markdown_text(item)}" for item in block.items)
    if isinstance(block, Table):
        lines = [block.columns, ["---" if i < block.n_text_columns else "---:" for i in range(len(block.columns))]]
        table = "\n".join("| " + " | ".join(map(_markdown_text, row)) + " |" for row in [*lines, *block.rows])
        return f"{table}\n\n{_markdown_text(block.note)}" if block.note else table
    if isinstance(block, Picture):
        return f"{_markdown_image(block, folder)}\n\n{_markdown_text(block.caption)}"
    cells = [
        f"| {_markdown_image(picture, folder)} | {_markdown_text(picture.caption)} |" for picture in block.pictures
    ]
    return "\n".join(["| episode | agent |", "|---|---|", *cells])


def _markdown_image(picture: Picture, folder: Path) -> str:
    """
    :param picture: a picture
    :param folder: where the report will be
    :return: its link
    """
    alt = re.sub(r"[\[\]|]", " ", picture.alt)
    return f"![{alt}]({picture.path.relative_to(folder).as_posix()})"


def _markdown_text(text: str) -> str:
    """
    :param text: plain text; what stands between backquotes is code
    :return: it in Markdown, in one line
    """
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    # In a table, GitHub ends a cell at a bar even within code
    return "".join(
        part.replace("|", "\\|") if part.startswith("`") else re.sub(r"([\\*_\[\]<>#|~])", r"\\\1", part)
        for part in parts
    )
