"""The ticks of stages: every micro-batch goes through every run, forward and back, in order."""

import itertools

import numpy as np
import pytest

from shardlm.parallel.pipeline import Schedule

SIZES = list(itertools.product([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5, 8, 9]))


def ticks(schedule, micro_batches):
    """When each (micro-batch, run) is done forward, and when backward: tick and item number."""
    stages, rounds = schedule.stages, schedule.rounds
    done = {"forward": {}, "backward": {}}
    for tick, stage in itertools.product(range(4 * (micro_batches + 9) * rounds), range(stages)):
        for way in done:
            item = getattr(schedule, way)(tick, stage, micro_batches)
            if item.valid:
                key = (item.micro_batch, item.round * stages + stage)
                assert key not in done[way]
                done[way][key] = tick, item.number
    every = set(itertools.product(range(micro_batches), range(schedule.runs)))
    assert done["forward"].keys() == done["backward"].keys() == every
    return done["forward"], done["backward"]


@pytest.mark.parametrize("stages, rounds, micro_batches", SIZES)
def test_every_run_takes_what_the_one_before_made_a_tick_ago(stages, rounds, micro_batches):
    schedule = Schedule(stages, rounds)
    forward, backward = ticks(schedule, micro_batches)
    last = schedule.runs - 1
    for (micro_batch, run), (tick, number) in forward.items():
        if run:
            assert tick == forward[micro_batch, run - 1][0] + 1
        back, same = backward[micro_batch, run]
        assert same == number
        if run < last:
            assert back == backward[micro_batch, run + 1][0] + 1
        else:
            assert back == tick
        # What is kept for it is not written over before.
        assert back - tick < schedule.kept


@pytest.mark.parametrize("stages, rounds, micro_batches", SIZES)
def test_loops_have_the_ticks_that_are_needed(stages, rounds, micro_batches):
    """The first losses at tick `lag`, the last when the loop that goes both ways ends."""
    schedule = Schedule(stages, rounds)
    forward, backward = ticks(schedule, micro_batches)
    losses = [tick for (_, run), (tick, _) in forward.items() if run == schedule.runs - 1]
    end = schedule.lag + schedule.items(micro_batches) - (rounds - 1) * stages
    assert min(losses) == min(tick for tick, _ in backward.values()) == schedule.lag
    assert max(losses) < end
    assert max(tick for tick, _ in forward.values()) < end
    assert max(tick for tick, _ in backward.values()) < end + schedule.lag


@pytest.mark.parametrize("stages, rounds, micro_batches", SIZES)
def test_bubble(stages, rounds, micro_batches):
    """Ticks in which a device has nothing to do, in each direction, over those in which it has."""
    schedule = Schedule(stages, rounds)
    forward, _ = ticks(schedule, micro_batches)
    span = max(tick for tick, _ in forward.values()) + 1
    work = micro_batches * rounds
    idle = span - work
    if micro_batches % stages == 0 or rounds == 1:
        assert idle == stages - 1
        assert schedule.bubble(micro_batches) == pytest.approx((stages - 1) / work)
    assert schedule.bubble(micro_batches) >= idle / work - 1e-9


def test_layers_of_a_device_lie_in_rounds():
    layers = Schedule(2, 3).layers(12)
    assert layers.tolist() == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert (Schedule(4).layers(8).reshape(-1) == np.arange(8)).all()
