"""Work against a count of pairs, level dealing against chance, and speeds that are learnt."""

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.config import ModelConfig
from shardlm.data.balance import HYSTERESIS, Speeds, WorkModel, deal, deal_micro_batches, imbalance
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
    row = np.repeat(np.arange(len(plan.row_length)), np.diff(plan.starts))
    work = WorkModel.of(model).rows(row, sizes[plan.pieces], plan.row_length)
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
    rows = model.rows(np.array([0, 1, 1, 1]), sizes, np.array([8, 9]))
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
    orders = deal(work, ways, speeds)
    again = deal([w.copy() for w in work], ways, speeds)
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
    loads = per_device(work, deal(work, WAYS, speeds.tolist()))
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
    for n in range(300):
        work = [random.choice(rows, 128, replace=False)]
        loads = per_device(work, deal(work, WAYS, speeds.at(n)))
        level = per_device(work, deal(work, WAYS))
        times.append((loads / true).max() / (level / true).max())
        seconds = loads / true * (1 + 0.05 * random.normal(size=WAYS))
        before, speeds = speeds, speeds.update(seconds.tolist(), loads.tolist(), n + 1, n + 1)
        changes.append(before.decisions != speeds.decisions)
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


def measure(speeds, seconds, work, times=1):
    """So many updates that were all alike; each decision is taken up at once."""
    for _ in range(times):
        speeds = speeds.update(seconds, work, 1, 1)
    return speeds


def test_small_changes_are_measured_and_not_taken_up():
    start = Speeds.level(2)
    assert start.measured == start.at(0) == start.at(9) == (1.0, 1.0)
    speeds = measure(start, [1.0, 1.04], [1.0, 1.0])
    assert speeds.at(9) == (1.0, 1.0)
    assert speeds.measured[0] == pytest.approx(1 + 0.05 * 0.02 / 1.02)
    speeds = measure(speeds, [1.0, 1.04], [1.0, 1.0], 500)
    assert speeds.at(9) == (1.0, 1.0)
    assert speeds.measured[0] / speeds.measured[1] == pytest.approx(1.04)
    speeds = measure(speeds, [1.0, 1.2], [1.0, 1.0], 500)
    dealt = speeds.at(9)
    assert dealt[0] / dealt[1] == pytest.approx(1.2, rel=2 * HYSTERESIS)
    assert math.fsum(dealt) == pytest.approx(2)


def test_a_decision_holds_from_the_first_update_that_is_not_prepared():
    """Those that are prepared keep theirs, also after a restart in between; older ones go."""
    speeds = Speeds.level(2)
    slow = [1.0, 9.0], [1.0, 1.0]
    speeds = speeds.update(*slow, now=5, start=8)
    first = speeds.measured
    assert [speeds.at(n) for n in (0, 5, 7)] == [(1.0, 1.0)] * 3
    assert speeds.at(8) == speeds.at(100) == first != (1.0, 1.0)
    speeds = speeds.update(*slow, now=6, start=9)
    second = speeds.measured
    assert [speeds.at(n) for n in (6, 7, 8, 9)] == [(1.0, 1.0), (1.0, 1.0), first, second]
    speeds = speeds.update([1.0, 1.0], [1.0, 1.0], now=9, start=12)
    assert speeds.decisions[0] == (9, second)


def test_one_stall_takes_a_twentieth_at_most():
    speeds = measure(Speeds.level(4), [1.0, 1e9, 1.0, 1.0], [1.0] * 4)
    assert speeds.measured[1] / speeds.measured[0] == pytest.approx(0.95)


def test_one_time_that_is_far_too_short_changes_little():
    speeds = measure(Speeds.level(64), [1e-3] + [1.0] * 63, [1.0] * 64)
    assert speeds.measured[0] / speeds.measured[1] == pytest.approx(1.05)
    assert math.fsum(speeds.measured) == pytest.approx(64)


def test_time_that_goes_with_work_changes_no_speed():
    speeds = measure(Speeds.level(3), [2.0, 3.0, 0.5], [200.0, 300.0, 50.0])
    assert speeds.measured == pytest.approx((1, 1, 1))


@pytest.mark.parametrize("bad", [[1.0], [1.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [1.0, math.inf]])
def test_measurements_that_are_none_are_refused(bad):
    good = [1.0, 1.0]
    with pytest.raises(ValueError, match=r"seconds of the devices is .* 2 positive, finite"):
        measure(Speeds.level(2), bad, good)
    with pytest.raises(ValueError, match=r"work of the devices is .* 2 positive, finite"):
        measure(Speeds.level(2), good, bad)


def test_speeds_are_restored_to_the_last_bit():
    speeds = Speeds.level(3)
    for n in range(20):
        speeds = speeds.update([1.0, 1.3 + 0.01 * n, 0.9], [1.0, 1.1, 1.2], n + 1, n + 9)
    assert Speeds.from_json(json.loads(json.dumps(speeds.to_json()))) == speeds
    assert len(speeds.decisions) > 1


COUNTS = st.tuples(
    st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
)


@given(COUNTS)
def test_micro_batches_of_unequal_devices(example):
    """All are made, each device makes one, and none of a device that makes two or more would be
    done sooner on another one."""
    counts, speeds = example
    ways, whole = len(speeds), sum(counts)
    made = deal_micro_batches(counts, speeds, 2 * whole)
    assert made.sum(axis=1).tolist() == [n * ways for n in counts]
    each = made.sum(axis=0)
    assert each.min() >= 1
    assert each.max() <= 2 * whole
    for d in range(ways):
        for other in range(ways):
            if each[d] > 1 and each[other] < 2 * whole:
                assert each[d] / speeds[d] <= (each[other] + 1) / speeds[other] * (1 + 1e-12)


@given(COUNTS, st.integers(1, 3), st.integers(0, 99))
def test_rows_go_where_their_micro_batches_are(example, each, seed):
    counts, speeds = example
    random = np.random.default_rng(seed)
    made = deal_micro_batches(counts, speeds, 2 * sum(counts)) * each
    work = [random.lognormal(sigma=1.0, size=n) for n in made.sum(axis=1)]
    orders = deal(work, len(speeds), speeds, made)
    for w, order, rows in zip(work, orders, made, strict=True):
        assert sorted(order.tolist()) == list(range(len(w)))
        if len(speeds) > 1:
            for hand in np.split(w[order], np.cumsum(rows)[:-1]):
                assert (np.diff(hand) <= 0).all()


def test_a_device_at_two_thirds_of_the_speed_makes_two_thirds_of_the_micro_batches():
    """With speeds 1, 1, 1 and 2/3, 12 micro-batches each in all: 13, 13, 13 and 9, where the work
    of the rows levels what is left; all alike, the slow one takes 18 of 13.1 that are possible."""
    speeds = [1.0, 1.0, 1.0, 2 / 3]
    (made,) = deal_micro_batches([12], speeds, 24)
    assert made.tolist() == [13, 13, 13, 9]
    (rows,) = text_rows(SMALL, 0)
    work = np.random.default_rng(5).choice(rows, 96, replace=False)
    (order,) = deal([work], 4, speeds, np.array([made * 2]))
    loads = [hand.sum() for hand in np.split(work[order], np.cumsum(made * 2)[:-1])]
    times = np.array(loads) / speeds
    assert max(times) < 1.01 * work.sum() / sum(speeds)
