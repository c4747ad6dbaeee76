"""The counts that a run states at its start."""

from shardlm.config import Config, TrainConfig
from shardlm.mesh.axes import AXES
from shardlm.train.arithmetic import Arithmetic


def arithmetic(batch, micro_batch, examples, steps=1, **sizes):
    config = Config(train=TrainConfig(batch=batch, micro_batch=micro_batch, steps=steps))
    return Arithmetic.of(config, dict.fromkeys(AXES, 1) | sizes, examples)


def test_1024_examples_on_4_devices():
    """256 rows a device on 4 devices: 4 device batches, one update, one epoch."""
    a = arithmetic(1024, None, 1024, data=4)
    assert (a.rows_a_device, a.device_batches, a.micro_batches) == (256, 4, 1)
    assert (a.updates_an_epoch, a.epochs) == (1, 1)
    assert str(a) == (
        "1,024 examples an epoch, 1 update of 1,024 rows: 1 epoch of 1 update\n"
        "an update: 1 micro-batch of 4 devices x 256 rows = 4 device batches"
    )


def test_sources_with_weights_have_epochs_of_their_own():
    config = Config(train=TrainConfig(batch=4, steps=5))
    sizes = dict.fromkeys(AXES, 1)
    first, _ = str(Arithmetic.of(config, sizes, 100, [("a", 0.5), ("b", 1.0)])).splitlines()
    assert first == "5 updates of 4 rows: 0.5 epochs of a, 1 epoch of b"


def test_micro_batches_replicas_and_part_of_an_epoch():
    a = arithmetic(48, 12, 100, steps=5, replica=2, data=3, model=4)
    assert (a.rows_a_device, a.micro_batches, a.device_batches) == (2, 4, 24)
    assert a.epochs == 2.4
    assert a.updates_an_epoch == 100 / 48
