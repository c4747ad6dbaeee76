"""The page as one HTML file: it needs no network, no script, and no other file."""

import html
import re
from collections.abc import Sequence

from shardlm.data.shown import LINE_FEED, TAB, Piece, ShownRow, ShownSegment
from shardlm.describe.sections import MASK, Bar, Section, row_title, segment_title
from shardlm.words import many

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
.legend { list-style: none; padding: 0; }
.row { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.segment { background: #4477aa22; border-left: 3px solid #4477aa; padding-left: 2px; }
.segment:nth-of-type(even) { background: #ccaa3333; border-left-color: #ccaa33; }
.segment.ends { border-right: 3px double #4477aa; }
.segment.ends:nth-of-type(even) { border-right-color: #ccaa33; }
.masked { background: #cc334466; text-decoration: underline; }
.id { color: #117733; } @media (prefers-color-scheme: dark) { .id { color: #77cc88; } }
.padding { opacity: .6; font-style: italic; }
"""


def render(
    title: str, sections: Sequence[Section], rows: Sequence[ShownRow], under: str | None
) -> str:
    """The whole file; `under` the rows is what there is to say of them."""
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
        _legend(rows),
        *map(_row, rows),
        *([] if under is None else [f'<p class="note">{html.escape(under)}</p>']),
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


def _legend(rows: Sequence[ShownRow]) -> str:
    """What each mark in the rows says, and no others. An entry has its own colours, as a row has:
    they take turns."""
    segments = [segment for row in rows for segment in row.segments]
    pieces = [piece for segment in segments for piece in segment.pieces]
    text = "".join(piece.text for piece in pieces if piece.kind == "text")
    entries = {
        '<span class="segment">a segment</span><span class="segment">the next in the row</span>': (
            any(len(row.segments) > 1 for row in rows)
        ),
        '<span class="segment ends">the document ends with the segment</span>': (
            any(segment.ends for segment in segments)
        ),
        '<span class="segment">the document goes on in another row</span>': (
            not all(segment.ends for segment in segments)
        ),
        '<span class="masked">places that predict nothing</span>': (
            not all(piece.predicts for piece in pieces)
        ),
        '<span class="id">⟨…⟩</span> a token without text': any(p.kind == "id" for p in pieces),
        f"{LINE_FEED} a line feed": LINE_FEED in text,
        f"{TAB} a tab": TAB in text,
        "␀ ␡ ⟨U+…⟩ and the like: characters that are not to be seen": (
            re.search(r"[␀-␈␋-␟␡]|⟨U\+", text) is not None
        ),
        "� a part of a character": "�" in text,
    }
    shown = (f'<li class="row">{entry}</li>' for entry, used in entries.items() if used)
    return f'<ul class="legend">{"".join(shown)}</ul>'


def _row(row: ShownRow) -> str:
    segments = "".join(_segment(s, number) for number, s in enumerate(row.segments, start=1))
    padding = (
        f'<i class="padding"> {many(row.padding, "place")} of padding</i>' if row.padding else ""
    )
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
    text = html.escape(piece.text).replace(LINE_FEED, f"{LINE_FEED}\n").replace(TAB, f"{TAB}\t")
    kinds = [piece.kind] * (piece.kind != "text") + ["masked"] * (not piece.predicts)
    return f'<span class="{" ".join(kinds)}">{text}</span>' if kinds else text
