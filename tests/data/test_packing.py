"""Packing against its definition, piece by piece, and what it wastes on documents like texts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.data.packing import Plan, best_fit, cut_pieces, one_each, waste

BUCKETS = (512, 1024, 2048, 4096)
T = 4096


def text_lengths(seed, count=20_000):
    """Tokens of documents: log-normal with a heavy tail (3% have twice the spread), of mean 600
    before the longest are clipped to 16,384."""
    random = np.random.default_rng(seed)
    spread = np.where(random.random(count) < 0.03, 2.4, 1.2)
    lengths = np.exp(random.normal(size=count) * spread)
    return np.clip(np.rint(lengths * (600 / lengths.mean())), 1, 16_384).astype(np.int64)


def row_lists(plan):
    """The pieces of each row, as lists."""
    return [row.tolist() for row in np.split(plan.pieces, plan.starts[1:-1])] if plan.rows else []


def expected_rows(sizes, lengths):
    """Rows by the rule of `best_fit`, as (length, pieces), in the order of the plan."""
    rows, room, since = [], [], []
    for time, piece in enumerate(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))):
        holding = [(room[i], since[i], i) for i in range(len(rows)) if room[i] >= sizes[piece]]
        if not holding:
            length = min(n for n in lengths if n >= sizes[piece])
            rows.append((length, []))
            room.append(length)
            since.append(time)
        row = min(holding)[2] if holding else len(rows) - 1
        rows[row][1].append(piece)
        room[row] -= sizes[piece]
        since[row] = time
    return sorted(rows, key=lambda row: row[0])


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted).map(tuple)


@st.composite
def sizes_and_lengths(draw):
    lengths = draw(LENGTHS)
    return draw(st.lists(st.integers(1, lengths[-1]), max_size=60)), lengths


@given(sizes_and_lengths())
def test_rows_are_those_of_best_fit_piece_by_piece(example):
    sizes, lengths = example
    plan = best_fit(np.array(sizes, np.int32), lengths)
    expected = expected_rows(sizes, lengths)
    assert row_lists(plan) == [pieces for _, pieces in expected]
    assert plan.row_length.tolist() == [length for length, _ in expected]


@pytest.mark.parametrize("lengths", [(64,), (8, 16, 32, 64), (5, 64)])
def test_many_pieces_of_few_sizes(lengths):
    """Runs of equal rows are split and joined again."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        sizes = random.choice(random.integers(1, 65, 9), 700)
        plan = best_fit(sizes, lengths)
        assert row_lists(plan) == [pieces for _, pieces in expected_rows(sizes.tolist(), lengths)]


@given(sizes_and_lengths(), st.sampled_from([best_fit, one_each]))
def test_every_piece_is_in_one_row_that_holds_it(example, pack):
    sizes, lengths = np.array(example[0], np.int64), example[1]
    plan = pack(sizes, lengths)
    assert sorted(plan.pieces.tolist()) == list(range(len(sizes)))
    used = np.array([sizes[row].sum() for row in row_lists(plan)], np.int64)
    assert (used <= plan.row_length).all()
    assert (used > 0).all()
    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == plan.rows == len(plan.row_length)
    assert all(sizes[row].tolist() == sorted(sizes[row], reverse=True) for row in row_lists(plan))
    padding = plan.row_length.sum() - sizes.sum()
    assert waste(plan, sizes) == pytest.approx(padding / max(plan.row_length.sum(), 1))


@given(sizes_and_lengths())
def test_one_each_takes_the_shortest_length(example):
    sizes, lengths = example
    plan = one_each(np.array(sizes, np.int32), lengths)
    shortest = [min(n for n in lengths if n >= size) for size in sizes]
    assert row_lists(plan) == [[i] for n in lengths for i in range(len(sizes)) if shortest[i] == n]
    assert plan.row_length.tolist() == sorted(shortest)


CUTS = st.tuples(st.integers(1, 9), st.integers(0, 8)).filter(lambda cut: cut[1] < cut[0])


@given(st.lists(st.integers(0, 40), max_size=9), CUTS)
def test_tokens_are_in_pieces_and_predicted_once(documents, cut):
    """Token by token: which piece holds it as an input, and which position has it as a target."""
    length, overlap = cut
    pieces = cut_pieces(np.array(documents, np.int64), length, overlap)
    held = [[0] * n for n in documents]
    predicted = [[0] * n for n in documents]
    idle = []
    for i in range(len(pieces)):
        document, offset = int(pieces.document[i]), int(pieces.offset[i])
        size, context = int(pieces.size[i]), int(pieces.context[i])
        assert 1 <= size <= length
        targets = 0
        for position in range(size):
            token = offset + position
            held[document][token] += 1
            if position >= context and token + 1 < documents[document]:
                predicted[document][token + 1] += 1
                targets += 1
        if not targets:
            idle.append(i)
    assert all(all(counts) for counts in held)
    assert predicted == [[0] * min(n, 1) + [1] * (n - 1) for n in documents]
    for i in idle:  # It is there for the document's last token, which no other piece holds.
        document = int(pieces.document[i])
        assert pieces.offset[i] + pieces.size[i] == documents[document]
        assert held[document][-1] == 1
        assert documents[document] == 1 or pieces.size[i] == overlap + 1


@given(st.lists(st.integers(0, 40), max_size=9), CUTS)
def test_what_fits_a_row_is_whole_and_the_rest_is_cut_at_the_stride(documents, cut):
    length, overlap = cut
    pieces = cut_pieces(np.array(documents, np.int64), length, overlap)
    for document, n in enumerate(documents):
        own = pieces.document == document
        offsets, sizes = pieces.offset[own].tolist(), pieces.size[own].tolist()
        if n <= length:
            assert (offsets, sizes) == (([0], [n]) if n else ([], []))
            continue
        assert offsets == [j * (length - overlap) for j in range(len(offsets))]
        assert sizes == [min(length, n - offset) for offset in offsets]
        assert offsets[-1] + sizes[-1] == n > offsets[-2] + sizes[-2]
        assert pieces.context[own].tolist() == [0] + [overlap] * (len(offsets) - 1)
    assert (np.diff(pieces.document) >= 0).all()


def test_documents_of_5_2_3_1_in_rows_of_4():
    pieces = cut_pieces(np.array([5, 2, 3, 1]), 4, 0)
    assert pieces.document.tolist() == [0, 0, 1, 2, 3]
    assert pieces.offset.tolist() == [0, 4, 0, 0, 0]
    assert pieces.size.tolist() == [4, 1, 2, 3, 1]
    plan = best_fit(pieces.size, (4,))
    assert row_lists(plan) == [[0], [3, 1], [2, 4]]
    assert waste(plan, pieces.size) == pytest.approx(1 / 12)
    assert waste(one_each(pieces.size, (4,)), pieces.size) == pytest.approx(9 / 20)
    overlapping = cut_pieces(np.array([5, 2, 3, 1]), 4, 2)
    assert overlapping.offset.tolist() == [0, 2, 0, 0, 0]
    assert overlapping.size.tolist() == [4, 3, 2, 3, 1]
    assert overlapping.context.tolist() == [0, 2, 0, 0, 0]


def test_nothing_makes_no_rows():
    pieces = cut_pieces(np.zeros(3, np.int64), 4, 0)
    assert len(pieces) == 0
    for pack in (best_fit, one_each):
        plan = pack(pieces.size, (2, 4))
        assert (plan.rows, waste(plan, pieces.size)) == (0, 0.0)


def optimal_lengths(sizes, count):
    """The `count` row lengths, multiples of 32 up to T, that waste least with a piece a row."""
    ends = np.arange(0, T + 1, 32)
    below = np.searchsorted(np.sort(sizes), ends, "right")
    # cost[i, j]: positions of the pieces above ends[i] and up to ends[j].
    cost = np.where(ends[:, None] < ends, (below - below[:, None]) * ends * 1.0, np.inf)
    least, choices = np.where(ends == 0, 0.0, np.inf), []
    for _ in range(count):
        total = least[:, None] + cost
        choices.append(total.argmin(axis=0))
        least = total.min(axis=0)
    end, lengths = len(ends) - 1, []
    for choice in reversed(choices):
        lengths.append(int(ends[end]))
        end = choice[end]
    return tuple(reversed(lengths))


def geometric_lengths(count, shortest=32):
    ratio = np.geomspace(shortest, T, count) if count > 1 else [T]
    return tuple(sorted({int(np.rint(x)) for x in ratio}))


@pytest.mark.parametrize("seed", range(3))
def test_padding_of_texts_is_below_its_bounds(seed):
    pieces = cut_pieces(text_lengths(seed), T, 0)
    sizes = pieces.size
    shares = {"best fit": waste(best_fit(sizes, (T,)), sizes)}
    shares["buckets"] = waste(best_fit(sizes, BUCKETS), sizes)
    shares["one each, buckets"] = waste(one_each(sizes, BUCKETS), sizes)
    for count in (1, 4, 8, 16, 32):
        for kind, lengths in (
            ("optimal", optimal_lengths(sizes, count)),
            ("geometric", geometric_lengths(count)),
        ):
            shares[f"one each, {count} {kind}"] = waste(one_each(sizes, lengths), sizes)
    print(f"\nseed {seed}: " + ", ".join(f"{k} {v:.3%}" for k, v in shares.items()))
    assert shares["best fit"] < 0.02
    assert shares["buckets"] < 0.05
    assert shares["one each, 1 optimal"] > 0.8


def test_the_same_sizes_make_the_same_plan():
    sizes = cut_pieces(text_lengths(5), T, 64).size
    first, second = best_fit(sizes, BUCKETS), best_fit(sizes.astype(np.int64), BUCKETS)
    assert isinstance(first, Plan)
    for name in ("pieces", "starts", "bounds"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
