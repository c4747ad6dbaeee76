"""The figures as tables of text, which the terminal and the HTML page both show."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardlm.data.describe import Balance, Description, Lengths, Packing, Source
from shardlm.data.shown import ShownRow, ShownSegment, visible
from shardlm.data.store import odd_documents
from shardlm.data.summary import Summary
from shardlm.words import many


class Bar(NamedTuple):
    """A cell with a bar in it."""

    share: float
    """Of the longest one, from 0 to 1."""


@dataclass(frozen=True)
class Section:
    """A table; its first column is a name, the others are numbers. All text is printable."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Bar, ...], ...]
    marked: int | None = None
    """The row of what is configured."""
    notes: tuple[str, ...] = ()


def sections(found: Description, dealt: str) -> list[Section]:
    """All tables in their order.

    Args:
      dealt: a note on where `found.ways` comes from.
    """
    return [
        _sources(found),
        _splits(found),
        _lengths(found.lengths, found.training.documents),
        _packings(found.packings, found.training.documents),
        _updates(found),
        *_balances(found, dealt),
    ]


def _sources(found: Description) -> Section:
    notes = [f"tokenizer {visible(found.tokenizer)}, {found.vocab_size:,} ids"]
    notes += _odd(found.sources)
    epochs = [f"{_epochs(s.epochs)} epochs" for s in found.sources]
    if len({*epochs}) == 1:
        said = epochs[0]
    else:
        pairs = zip(epochs, found.sources, strict=True)
        said = ", ".join(f"{n} of {visible(s.name)}" for n, s in pairs)
    notes.append(
        f"{many(found.steps, 'update')}: {said}; {many(found.steps * found.places, 'place')}"
    )
    return Section(
        "Sources",
        (
            *("source", "documents", "tokens", "bytes per token, about"),
            *("share", "epochs", "tokens read"),
        ),
        tuple(
            (
                visible(s.name),
                f"{s.documents:,}",
                f"{s.tokens:,}",
                "unknown" if s.bytes_per_token is None else f"{s.bytes_per_token:.2f}",
                f"{s.share:.1%}",
                _epochs(s.epochs),
                f"{round(s.epochs * s.training_tokens):,}",
            )
            for s in found.sources
        ),
        notes=tuple(notes),
    )


def _odd(sources: tuple[Source, ...]) -> Iterator[str]:
    odd = {source.name: odd_documents(vars(source)) for source in sources}
    yield from (f"{visible(name)}: {', '.join(said)}" for name, said in odd.items() if said)
    if not any(odd.values()):
        yield "no document was empty, left out or changed"


def _splits(found: Description) -> Section:
    splits: dict[str, Summary | None] = {
        "training": found.training,
        "validation": found.validation,
    }
    tokens = sum(s.tokens for s in splits.values() if s)
    return Section(
        "Splits",
        ("split", "documents", "tokens", "share", "predicted", "rows"),
        tuple(
            (
                name,
                f"{s.documents:,}",
                f"{s.tokens:,}",
                f"{s.tokens / tokens:.1%}",
                f"{s.loss_tokens:,}",
                f"{s.rows:,}",
            )
            for name, s in splits.items()
            if s
        ),
        notes=() if found.validation else ("nothing is kept for validation",),
    )


def _lengths(lengths: Lengths, documents: int) -> Section:
    tokens = sum(c.tokens for c in lengths.classes)
    most = max(c.documents for c in lengths.classes), max(c.tokens for c in lengths.classes)
    rows = tuple(
        (
            f"{c.least:,} to {2 * c.least - 1:,}" if c.least > 1 else "1",
            f"{c.documents:,}",
            f"{c.documents / documents:.1%}",
            Bar(c.documents / most[0]),
            f"{c.tokens / tokens:.1%}",
            Bar(c.tokens / most[1]),
        )
        for c in lengths.classes
    )
    names = {0: "shortest", 50: "median", 100: "longest"}
    said = [f"{names.get(p, f'{p}%')} {n:,}" for p, n in lengths.percentiles.items()]
    return Section(
        "Lengths of training documents, in tokens",
        ("tokens", "documents", "share", "", "of all tokens", ""),
        rows,
        notes=(
            f"{', '.join(said)}; mean {lengths.mean:,.1f}",
            f"longer than a row: {many(lengths.longer, 'document')}, "
            f"{lengths.longer / documents:.1%}",
        ),
    )


def _packings(packings: tuple[Packing, ...], documents: int) -> Section:
    problems = tuple(f"{p.name} cannot be: {visible(p.problem)}" for p in packings if p.problem)
    return Section(
        "Packings, an epoch of each",
        ("data.packing", "waste", "documents cut", "rows", "updates", "row lengths"),
        tuple(
            (p.name, "-", "-", "-", "-", "-")
            if p.problem
            else (
                p.name,
                f"{p.waste:.2%}",
                f"{p.cut / documents:.1%}",
                f"{p.rows:,}",
                f"{p.updates:,.1f}",
                ", ".join(f"{shape.length:,}" for shape in p.shapes),
            )
            for p in packings
        ),
        marked=next(i for i, p in enumerate(packings) if p.configured),
        notes=(
            "waste: places that hold no token, or one that data.overlap repeats; documents cut: "
            "those in more than one row (concat cuts at other places in every epoch)",
            *problems,
        ),
    )


def _updates(found: Description) -> Section:
    return Section(
        "An update",
        ("micro-batch", "places", "an update"),
        tuple(
            (str(shape), f"{shape.places:,}", f"{count:.2f}")
            for shape, count in zip(_configured(found).shapes, found.micro_batches, strict=True)
        ),
        notes=(
            f"{found.predicted:,.1f} of the {found.places:,} places of an update predict a token "
            f"(mean of {many(found.sampled, 'update')} of the run)",
            f"{found.updates_per_epoch:,.1f} updates an epoch",
        ),
    )


def _balances(found: Description, dealt: str) -> list[Section]:
    if not found.balances:
        return [Section("Balance", (), (), notes=(dealt,))]

    def row(balance: Balance) -> tuple[str, ...]:
        return balance.name, f"{balance.mean:.4f}", f"{balance.worst:.4f}"

    return [
        Section(
            f"Balance over {found.ways} devices: work of the heaviest over the mean",
            ("data.balance", "mean", "worst"),
            tuple(map(row, found.balances)),
            marked=next(i for i, b in enumerate(found.balances) if b.configured),
            notes=(
                dealt,
                *(["one row a device: nothing to deal"] if _rows(found) == found.ways else []),
                f"estimated FLOPs with attention, in {many(found.sampled, 'update')} of the run",
                "dynamic: equal speeds assumed",
            ),
        )
    ]


def _rows(found: Description) -> float:
    """Of an update, their mean."""
    counts = zip(_configured(found).shapes, found.micro_batches, strict=True)
    return sum(shape.rows * count for shape, count in counts)


def _configured(found: Description) -> Packing:
    (packing,) = (p for p in found.packings if p.configured)
    return packing


def without_border(found: Description) -> str | None:
    """Why no border between documents is to be seen; None where one is."""
    if any(len(row.segments) > 1 for row in found.rows):
        return None
    longest = max(row.length for row in found.rows)
    why = f"documents have {found.lengths.mean:,.1f} tokens on average, rows {longest:,} places"
    if _configured(found).name == "none":
        why = "with data.packing none each has one document, or a piece of one"
    return f"none of these rows has a border between documents: {why}"


def row_title(row: ShownRow) -> str:
    """What stands above a row."""
    return (
        f"update {row.update:,}, row {row.number:,} of {row.rows:,}: {many(row.length, 'place')}, "
        f"{row.predicted:,} of them predict; {many(len(row.segments), 'segment')}, "
        f"{row.padding:,} of padding"
    )


def segment_title(segment: ShownSegment, number: int) -> str:
    """What there is to say of the `number`-th segment of a row."""
    ends = "the document ends" if segment.ends else "the document goes on in another row"
    places = f"{many(segment.places, 'place')}, {segment.predicted:,} predict"
    return f"segment {number:,}: {places}; {ends}"


def _epochs(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


MASK = (
    "Each place predicts the token after it; the marked ones predict nothing: where a document "
    "ends, and where a piece repeats the one before it. A segment sees nothing of the others."
)
"""How to read the rows."""
