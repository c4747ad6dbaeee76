"""Work against a count of pairs, level dealing against chance, and speeds that are learnt."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.config import ModelConfig
from shardlm.data.balance import HYSTERESIS, Speeds, WorkModel, deal, imbalance
from shardlm.data.errors import DataError
from shardlm.data.packing import best_fit, cut_pieces
from shardlm.model.flops import flops_per_token

SMALL = ModelConfig(layers=4, embed=256, heads=4, mlp=688, vocab=256)
LARGE = ModelConfig(layers=32, embed=4096, heads=32, kv_heads=8, mlp=14336, vocab=128_256)
WINDOWED = replace(SMALL, layers=5, kv_heads=2, head_dim=48, activation="gelu", windows=(96, 96, 0))
WAYS = 8


def text_rows(model, seed, lengths=(4096,)):
    """Work of the rows of each length that best fit makes of 20,000 documents, log-normal with a
    heavy tail (3% have twice the spread), of mean 600 before the longest are clipped to 16,384."""
    random = np.random.default_rng(seed)
    spread = np.where(random.random(20_000) < 0.03, 2.4, 1.2)
    documents = np.exp(random.normal(size=20_000) * spread)
    documents = np.clip(np.rint(documents * (600 / documents.mean())), 1, 16_384).astype(np.int64)
    sizes = cut_pieces(documents, lengths[-1], 0).size
    plan = best_fit(sizes, lengths)
    work = WorkModel.of(model).rows(sizes[plan.pieces], plan.starts, plan.row_length)
    return np.split(work, plan.bounds[1:-1])


def per_device(work, orders, ways=WAYS):
    """Work of each device over all shapes."""
    return sum(w[o].reshape(ways, -1).sum(axis=1) for w, o in zip(work, orders, strict=True))


@pytest.mark.parametrize("model", [SMALL, LARGE, WINDOWED])
@pytest.mark.parametrize("length", [1, 60, 96, 4096])
def test_work_of_a_row_of_one_document_is_that_of_the_model_flops(model, length):
    """But for the diagonal, which the model FLOPs count half and which is whole here."""
    windows = [model.windows[i % len(model.windows)] or length for i in range(model.layers)]
    diagonal = sum(min(window, length) for window in windows) / 2
    expected = flops_per_token(model, length) * length
    expected += 12.0 * model.heads * model.k_dim * diagonal
    work = WorkModel.of(model).pieces(np.array([length]))
    assert work.tolist() == pytest.approx([expected], rel=1e-12)


def test_work_counts_pairs_of_each_document_and_all_positions():
    model = WorkModel(per_token=1000.0, per_pair=10.0, windows=((0, 2), (3, 1)))
    seen = [sum(2 * (q + 1) + min(q + 1, 3) for q in range(n)) for n in (7, 2, 3, 1)]
    sizes = np.array([7, 2, 3, 1], np.int32)
    assert model.pieces(sizes).tolist() == [
        1000 * n + 10 * pairs for n, pairs in zip(sizes.tolist(), seen, strict=True)
    ]
    rows = model.rows(sizes, np.array([0, 1, 4]), np.array([8, 9]))
    assert rows.tolist() == [8000 + 10 * seen[0], 9000 + 10 * sum(seen[1:])]


SHAPES = st.integers(1, 6).flatmap(
    lambda ways: st.tuples(
        st.just(ways),
        st.lists(
            st.integers(0, 5).flatmap(
                lambda each: st.lists(
                    st.floats(1e-3, 1e3), min_size=each * ways, max_size=each * ways
                )
            ),
            max_size=3,
        ),
        st.none() | st.lists(st.floats(0.1, 10), min_size=ways, max_size=ways),
    )
)


@given(SHAPES)
def test_every_device_gets_as_many_rows_of_each_shape_in_falling_order(example):
    ways, work, speeds = example
    work = [np.array(w) for w in work]
    orders = deal(work, ways, None if speeds is None else np.array(speeds))
    again = deal([w.copy() for w in work], ways, None if speeds is None else np.array(speeds))
    assert [o.tolist() for o in orders] == [o.tolist() for o in again]
    for w, order in zip(work, orders, strict=True):
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(len(w)))  # So all parts are of one size.
        if ways == 1:
            assert order.tolist() == list(range(len(w)))
        else:
            assert (np.diff(w[order].reshape(ways, -1), axis=1) <= 0).all()


@given(
    st.integers(2, 6).flatmap(
        lambda ways: st.tuples(
            st.just(ways), st.integers(1, 6).map(lambda each: each * ways), st.integers(0, 99)
        )
    )
)
def test_no_device_is_above_the_lightest_by_more_than_rows_differ(example):
    """Were it, then one of its rows would have more work than one of the lightest device's, by less
    than the two devices differ, and swapping these would help."""
    ways, count, seed = example
    work = np.random.default_rng(seed).lognormal(sigma=2.0, size=count)
    loads = per_device([work], deal([work], ways), ways)
    assert loads.max() <= max(loads.min() + np.ptp(work), 1.005 * loads.mean()) * (1 + 1e-9)


def test_the_best_of_all_deals_is_found_or_nearly_for_few_rows():
    """Six rows to two devices: at most 5% above the best of the ten deals."""
    for seed in range(50):
        work = np.random.default_rng(seed).uniform(1, 4, 6)
        best = min(
            max(work[list(c)].sum(), work.sum() - work[list(c)].sum())
            for c in combinations(range(6), 3)
        )
        assert per_device([work], deal([work], 2), 2).max() <= 1.05 * best


@pytest.mark.parametrize("name, model", [("small", SMALL), ("large", LARGE)])
def test_packed_rows_are_dealt_level(name, model):
    """128 rows of 4,096 over 8 devices, of each of 200 updates; dealt at random: in given order."""
    (rows,) = text_rows(model, 0)
    random = np.random.default_rng(1)
    chance, dealt, slots = [], [], []
    for _ in range(200):
        work = random.choice(rows, 128, replace=False)
        chance.append(imbalance(work.reshape(WAYS, -1).sum(axis=1)))
        (order,) = deal([work], WAYS)
        dealt.append(imbalance(per_device([work], [order])))
        slot = work[order].reshape(WAYS, 8, 2).sum(axis=2)  # Micro-batches of 2 rows a device.
        given_order = work.reshape(WAYS, 8, 2).sum(axis=2)
        slots.append([x.max(axis=0).sum() / x.mean(axis=0).sum() for x in (given_order, slot)])
    print(
        f"\n{name}: given order mean {np.mean(chance):.4f} worst {max(chance):.4f}, "
        f"dealt mean {np.mean(dealt):.4f} worst {max(dealt):.4f}; slowest of each micro-batch "
        f"{np.mean(slots, axis=0)[0]:.4f} and {np.mean(slots, axis=0)[1]:.4f}"
    )
    assert max(dealt) < 1.005
    assert max(dealt) < 1 + (np.mean(chance) - 1) / 5
    assert np.mean(slots, axis=0)[1] < 1.02


@pytest.mark.parametrize(
    "count, worst, mean", [(16, 1.02, 1.002), (32, 1.03, 1.007), (64, 1.005, 1.0015)]
)
def test_rows_of_several_shapes_are_level_together(count, worst, mean):
    """As level as the heaviest rows allow: of the longest shape, two to a device are at best the
    heaviest with the lightest and so on, with the lightest of all other shapes."""
    shapes = text_rows(SMALL, 0, (512, 1024, 2048, 4096))
    random = np.random.default_rng(2)
    over = []
    for _ in range(50):
        work = [random.choice(rows, count, replace=False) for rows in shapes]
        loads = per_device(work, deal(work, WAYS))
        least = loads.mean()
        if count == 2 * WAYS:
            *others, longest = (np.sort(w) for w in work)
            pairs = longest[:WAYS] + longest[: WAYS - 1 : -1]
            least = max(least, pairs.max() + sum(w[:2].sum() for w in others))
        over.append(loads.max() / least)
    assert max(over) < worst
    assert np.mean(over) < mean


def test_a_slow_device_gets_rows_with_less_work():
    (rows,) = text_rows(SMALL, 0)
    work = [np.random.default_rng(3).choice(rows, 128, replace=False)]
    speeds = np.array([1, 1, 0.8, 1, 1, 1, 1, 1.2])
    loads = per_device(work, deal(work, WAYS, speeds))
    assert (loads / speeds).max() < 1.005 * loads.sum() / speeds.sum()
    assert loads.argmin() == 2
    assert loads.argmax() == 7


@pytest.mark.parametrize("name, model, least", [("small", SMALL, 0.26), ("large", LARGE, 0.02)])
def test_speeds_are_learnt_and_the_slowest_is_done_sooner(name, model, least):
    """One of 8 devices takes 1.5 times as long, and times have 5% of noise. Level would be 30% off
    the slowest one's time; as rows are as many for all, they must differ enough for that."""
    (rows,) = text_rows(model, 0)
    random = np.random.default_rng(4)
    true = np.where(np.arange(WAYS) == 3, 1 / 1.5, 1.0)
    speeds, times, changes = Speeds.level(WAYS), [], []
    for _ in range(300):
        work = [random.choice(rows, 128, replace=False)]
        loads = per_device(work, deal(work, WAYS, np.array(speeds.shares)))
        level = per_device(work, deal(work, WAYS))
        times.append((loads / true).max() / (level / true).max())
        seconds = loads / true * (1 + 0.05 * random.normal(size=WAYS))
        before, speeds = speeds, speeds.update(seconds.tolist(), loads.tolist())
        changes.append(before.shares != speeds.shares)
    learnt = np.mean(times[100:])
    print(
        f"\n{name}: slowest after 10, 20, 50, 100 updates "
        f"{', '.join(f'{times[n]:.3f}' for n in (10, 20, 50, 100))}, then mean {learnt:.4f}; "
        f"dealt otherwise {sum(changes[:100])} times, then {sum(changes[100:])} times in 200"
    )
    assert times[0] == 1
    assert learnt < 1 - least
    assert np.allclose(speeds.measured, true / true.mean(), rtol=0.04)  # 5 errors of 0.8%
    assert sum(changes[100:]) <= 5


def test_small_changes_are_measured_and_not_taken_up():
    start = Speeds.level(2)
    assert start.shares == start.measured == (1.0, 1.0)
    speeds = start.update([1.0, 1.04], [1.0, 1.0])
    assert speeds.shares == (1.0, 1.0)
    assert speeds.measured[0] == pytest.approx(1 + 0.05 * 0.02 / 1.02)
    for _ in range(500):
        speeds = speeds.update([1.0, 1.04], [1.0, 1.0])
    assert speeds.shares == (1.0, 1.0)
    assert speeds.measured[0] / speeds.measured[1] == pytest.approx(1.04)
    for _ in range(500):
        speeds = speeds.update([1.0, 1.2], [1.0, 1.0])
    assert speeds.shares[0] / speeds.shares[1] == pytest.approx(1.2, rel=2 * HYSTERESIS)
    assert math.fsum(speeds.shares) == pytest.approx(2)


def test_one_stall_takes_a_twentieth_at_most():
    speeds = Speeds.level(4).update([1.0, 1e9, 1.0, 1.0], [1.0] * 4)
    assert speeds.measured[1] == pytest.approx(0.95)


def test_time_that_goes_with_work_changes_no_speed():
    speeds = Speeds.level(3).update([2.0, 3.0, 0.5], [200.0, 300.0, 50.0])
    assert speeds.measured == pytest.approx((1, 1, 1))


@pytest.mark.parametrize("bad", [[1.0], [1.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [1.0, math.inf]])
def test_measurements_that_are_none_are_refused(bad):
    good = [1.0, 1.0]
    with pytest.raises(ValueError, match=r"seconds of the devices is .* 2 positive, finite"):
        Speeds.level(2).update(bad, good)
    with pytest.raises(ValueError, match=r"work of the devices is .* 2 positive, finite"):
        Speeds.level(2).update(good, bad)


def test_speeds_are_restored_to_the_last_bit():
    speeds = Speeds.level(3)
    for n in range(20):
        speeds = speeds.update([1.0, 1.3 + 0.01 * n, 0.9], [1.0, 1.1, 1.2])
    assert Speeds.from_json(speeds.to_json()) == speeds
    assert speeds.shares != speeds.measured


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"shares": [1.0]}',
        '{"shares": [1.0], "measured": [1.0, 1.0]}',
        '{"shares": [], "measured": []}',
        '{"shares": [1.0], "measured": [NaN]}',
        '{"shares": ["1"], "measured": [1.0]}',
    ],
)
def test_stored_speeds_that_are_none_are_refused(text):
    with pytest.raises(DataError, match="the stored speeds of the devices cannot be read"):
        Speeds.from_json(text)
