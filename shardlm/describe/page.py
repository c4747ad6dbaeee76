"""The page as one HTML file: it needs no network, no script, and no other file."""

import html
from collections.abc import Sequence

from shardlm.data.shown import Piece, ShownRow, ShownSegment
from shardlm.describe.sections import MASK, Bar, Section, row_title, segment_title

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; vertical-align: top; }
th { font-weight: normal; opacity: .65; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
tr.configured { font-weight: bold; }
p { margin: .3rem 0; } p.note { opacity: .8; }
.bar { width: 12rem; } .bar div { height: 1em; background: #4477aa; margin-top: .25em; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
.row { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.segment { background: #4477aa22; border-left: 3px solid #4477aa; padding-left: 2px; }
.segment:nth-of-type(even) { background: #ccaa3333; border-left-color: #ccaa33; }
.segment.ends { border-right: 3px double #4477aa; }
.segment.ends:nth-of-type(even) { border-right-color: #ccaa33; }
.masked { background: #cc334466; text-decoration: underline; }
.id { color: #117733; } @media (prefers-color-scheme: dark) { .id { color: #77cc88; } }
.padding { opacity: .6; font-style: italic; }
"""


def render(title: str, sections: Sequence[Section], rows: Sequence[ShownRow]) -> str:
    """The whole file."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # Whatever the text holds, nothing is loaded and nothing runs.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        *map(_section, sections),
        "<h2>Rows</h2>",
        f'<p class="note">{html.escape(MASK)}</p>',
        _legend(),
        *map(_row, rows),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(section: Section) -> str:
    lines = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.columns:
        heads = "".join(f"<th>{html.escape(column)}</th>" for column in section.columns)
        lines.append(f"<table><tr>{heads}</tr>")
        for number, row in enumerate(section.rows):
            marked = number == section.marked
            cells = "".join(map(_cell, row)) + ("<td>← configured</td>" if marked else "")
            lines.append(f"<tr{' class=configured' if marked else ''}>{cells}</tr>")
        lines.append("</table>")
    lines += [f'<p class="note">{html.escape(note)}</p>' for note in section.notes]
    return "\n".join(lines)


def _cell(cell: str | Bar) -> str:
    if isinstance(cell, Bar):
        return f'<td class="bar"><div style="width:{cell.share:.1%}"></div></td>'
    return f"<td>{html.escape(cell)}</td>"


def _legend() -> str:
    shown = [
        '<span class="segment ends">a segment with which its document ends</span>',
        '<span class="segment">one whose document goes on in another row</span>',
        '<span class="masked">places that predict nothing</span>',
        '<span class="id">⟨end⟩</span> a token without text',
        "␊ a line feed, � a part of a character",
    ]
    return f'<p class="row legend">{"   ".join(shown)}</p>'


def _row(row: ShownRow) -> str:
    segments = "".join(_segment(s, number) for number, s in enumerate(row.segments, start=1))
    padding = f'<i class="padding"> {row.padding:,} places of padding</i>' if row.padding else ""
    return (
        f"<h3>{html.escape(row_title(row))}</h3>\n"
        f'<div class="row content">{segments}{padding}</div>'
    )


def _segment(segment: ShownSegment, number: int) -> str:
    ends = " ends" if segment.ends else ""
    title = html.escape(segment_title(segment, number))
    return (
        f'<span class="segment{ends}" title="{title}">{"".join(map(_piece, segment.pieces))}</span>'
    )


def _piece(piece: Piece) -> str:
    # The signs stay, and do what they stand for.
    text = html.escape(piece.text).replace("␊", "␊\n").replace("␉", "␉\t")
    kinds = [piece.kind] * (piece.kind != "text") + ["masked"] * (not piece.predicts)
    return f'<span class="{" ".join(kinds)}">{text}</span>' if kinds else text
