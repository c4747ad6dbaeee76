"""The page on a terminal, or as plain text in a file: what colours say, signs say too."""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardlm.data.shown import LINE_FEED, Piece, ShownRow, shorten
from shardlm.describe.sections import MASK, Bar, Section, row_title
from shardlm.words import many

CHARACTERS = 320
"""Of a segment that are shown."""
SEGMENTS = 8
"""Of a row that are shown."""
BAR = 16
"""Characters of the longest bar."""
WIDTH = 100
"""Characters of a line where there is no terminal."""


def show(
    title: str, sections: Sequence[Section], rows: Sequence[ShownRow], under: str | None
) -> None:
    """Print everything on standard output; `under` the rows is what there is to say of them."""
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    # Printed by `print`: the library would end the process where a pipe is closed.
    with console.capture() as capture:
        console.print(Text(title, "bold"))
        for section in sections:
            console.print()
            console.print(Text(section.title, "bold"))
            if section.columns:
                console.print(_table(section))
            for note in section.notes:
                console.print(Padding(Text(note), (0, 0, 0, 2)))
        console.print()
        console.print(Text("Rows", "bold"))
        console.print(Padding(_legend(), (0, 0, 0, 2)))
        for row in rows:
            console.print()
            console.print(Text(row_title(row), "bold"))
            console.print(_row(row))
        if under is not None:
            console.print()
            console.print(Padding(Text(under), (0, 0, 0, 2)))
    # It fills lines up with spaces.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _table(section: Section) -> Padding:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(section.columns):
        bars = any(isinstance(row[number], Bar) for row in section.rows)
        table.add_column(
            Text(column),
            justify="left" if number == 0 or bars else "right",
            overflow="fold",
        )
    if section.marked is not None:
        table.add_column()
    for number, row in enumerate(section.rows):
        marked = number == section.marked
        cells = [
            Text("█" * round(cell.share * BAR) if isinstance(cell, Bar) else cell) for cell in row
        ]
        if section.marked is not None:
            cells.append(Text("← configured" if marked else ""))
        table.add_row(*cells, style="bold" if marked else "")
    return Padding(table, (0, 0, 0, 2))


def _legend() -> Text:
    return Text.assemble(
        f"{MASK} Marked: ",
        *_marked([Piece("so", False), Piece("⟨end⟩", False, "id")]),
        "; ",
        *_marked([Piece("⟨end⟩", True, "id")]),
        f" is a token without text, {LINE_FEED} a line feed, � a part of a character; ",
        ("│ the document ends with the segment, ┆ it goes on in another row.", ""),
    )


def _row(row: ShownRow) -> Padding:
    """Its segments, each from a line of its own on; of many, the first and the last."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim")
    table.add_column(overflow="fold")
    left_out = len(row.segments) - SEGMENTS
    for number, segment in enumerate(row.segments, start=1):
        if left_out > 0 and SEGMENTS // 2 < number <= len(row.segments) - SEGMENTS // 2:
            if number == SEGMENTS // 2 + 1:
                table.add_row("", Text(f"… {many(left_out, 'segment')} …", "dim"))
            continue
        shown = Text.assemble(*_marked(shorten(segment.pieces, CHARACTERS)))
        table.add_row(f"{number:,} {'│' if segment.ends else '┆'}", shown)
    if row.padding:
        table.add_row("", Text(f"… {many(row.padding, 'place')} of padding", "dim"))
    return Padding(table, (0, 0, 0, 2))


def _marked(pieces: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    """Texts and their styles. Signs go around runs of pieces that predict nothing."""
    inside = False
    for piece in pieces:
        # What is left out may be of both kinds.
        if inside != (masked := not piece.predicts and piece.kind != "gap"):
            yield "⟦" if masked else "⟧", "red"
            inside = masked
        style = "dim" if piece.kind == "gap" else "cyan" if piece.kind == "id" else ""
        yield piece.text, "red" if masked else style
    if inside:
        yield "⟧", "red"
