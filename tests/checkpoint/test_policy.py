"""When a save is due."""

from shardlm.checkpoint import SavePolicy


def steps_saved(policy, steps, seconds_per_step, start=0):
    """Steps that a loop saves which began at `start` and takes so long for an update."""
    last_step, last_time, saved = start, 0.0, []
    for step in range(start + 1, steps + 1):
        now = (step - start) * seconds_per_step
        if policy.due(step, now, last_step, last_time):
            saved.append(step)
            last_step, last_time = step, now
    return saved


def test_by_steps():
    assert steps_saved(SavePolicy(4, 0), 13, 1.0) == [4, 8, 12]
    assert steps_saved(SavePolicy(4, 0), 13, 1.0, start=6) == [8, 12]


def test_by_minutes():
    assert steps_saved(SavePolicy(0, 1), 10, 25.0) == [3, 6, 9]
    assert steps_saved(SavePolicy(0, 0.5), 5, 30.0) == [1, 2, 3, 4, 5]


def test_either_and_neither():
    # A save by steps restarts the clock: step 5, then 3 x 25 s later step 8, then step 10.
    assert steps_saved(SavePolicy(5, 1), 10, 25.0) == [3, 5, 8, 10]
    assert steps_saved(SavePolicy(0, 0), 100, 1e6) == []


def test_a_save_that_was_let_pass_is_made_up_for():
    policy = SavePolicy(4, 0)
    assert [step for step in range(5, 12) if policy.due(step, 0.0, 4, 0.0)] == [8, 9, 10, 11]
    assert not policy.due(10, 0.0, 9, 0.0)
    assert policy.due(12, 0.0, 9, 0.0)


def test_a_step_is_saved_once():
    policy = SavePolicy(5, 1)
    assert policy.due(5, 100.0, 4, 0.0)
    assert not policy.due(5, 100.0, 5, 0.0)
