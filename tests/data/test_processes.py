"""Processes that share one store: what each of them reads, and that together they read everything.

Forked from one process, which has imported all they need, before any of them opens anything.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardlm.config import Config, DataConfig, TrainConfig
from shardlm.data import Buckets, load_data

WAYS = 4
LENGTH = 16
KINDS = {
    "concat": {},
    "best_fit": {"packing": "best_fit", "overlap": 3},
    "none": {"packing": "none"},
    "padded_buckets": {"packing": "padded_buckets", "buckets": 3},
    "mixture": {"packing": "best_fit", "weights": (3.0, 1.0)},
}
STAGES = [(1, 0, 3), (4, 3, 6), (2, 6, 8), (4, 10**6, 10**6 + 2)]
"""How many processes make updates from which to which: another number at every restart."""

FORKED = """
import os, pickle, sys
from itertools import islice
import grain
import numpy as np
from shardlm.data import Loader, Share, load_data, loader
from shardlm.data.corpus import Tokens

gathered = []
gather = Tokens.gather
def recording(self, starts, sizes):
    gathered.extend(np.arange(s, s + n) for s, n in zip(starts, sizes))
    return gather(self, starts, sizes)
Tokens.gather = recording

places = {}
loader.TOGETHER = 1  # So that it is known what each is made of.
several = Loader.several
def remembering(self, step, count, share):
    gathered.clear()
    updates = several(self, step, count, share)
    places[step] = np.concatenate(gathered)
    return updates
Loader.several = remembering

def work(configs, stages, number):
    found = {}
    for kind, config in configs.items():
        for processes, start, stop in stages:
            if number >= processes:
                continue
            data = load_data(config)  # As a process that has just started.
            data.train.deal_to(4)
            updates = data.train.iterate(start, Share(number, processes))
            for step, update in enumerate(islice(updates, stop - start), start):
                found[kind, step] = update, places[step]
            updates.close()
        found[kind, "evaluated"] = [b["tokens"].shape for b in data.validation.batches(4)]
    return found

with open("given", "rb") as file:
    given = pickle.load(file)
children = {}
for number in range(4):
    child = os.fork()
    if not child:
        try:
            with open(f"found{number}", "wb") as file:
                pickle.dump(work(*given, number), file)
            os._exit(0)
        finally:
            os._exit(1)
    children[child] = number
for _ in range(4):
    child, status = os.wait()
    assert status == 0, f"process {children[child]}: {status}"
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Of each kind a configuration. Every character of the two sources is another one, and so
    every id is its place."""
    folder, first, sources = tmp_path_factory.mktemp("sources"), 0x4E00, []
    random = np.random.default_rng(0)
    for name, count in (("a", 80), ("b", 30)):
        rows = []
        for size in random.integers(2, 40, count).tolist():
            rows.append(json.dumps({"text": "".join(map(chr, range(first, first + size)))}))
            first += size
        sources.append(str(folder / f"{name}.jsonl"))
        Path(sources[-1]).write_text("\n".join(rows))
    return {
        kind: Config(
            data=DataConfig(
                sources=tuple(sources),
                cache=str(folder / "cache"),
                tokenizer="characters",
                validation=0.2,
                length=LENGTH,
                prefetch=4,
                **data,
            ),
            train=TrainConfig(batch=8, micro_batch=4),
        )
        for kind, data in KINDS.items()
    }


@pytest.fixture(scope="module")
def processes(configs, tmp_path_factory):
    """What each of four processes was given, by kind and update."""
    folder = tmp_path_factory.mktemp("found")
    for config in configs.values():
        load_data(config)  # Tokenizes.
    (folder / "given").write_bytes(pickle.dumps((configs, STAGES)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / f"found{number}").read_bytes()) for number in range(4)]


def parts_of(batch):
    return list(batch.parts) if isinstance(batch, Buckets) else [batch]


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_the_update_and_no_more_is_read(kind, configs, processes):
    alone = load_data(configs[kind]).train
    alone.deal_to(WAYS)
    for count, start, stop in STAGES:
        for step in range(start, stop):
            whole = alone.at(step)
            shares = [processes[number][kind, step] for number in range(count)]
            for n, expected in enumerate(parts_of(whole.batch)):
                for key in expected:
                    joined = np.concatenate([parts_of(u.batch)[n][key] for u, _ in shares])
                    assert np.array_equal(joined, expected[key])
            for update, places in shares:
                assert np.array_equal(update.work, whole.work)
                assert np.array_equal(update.tokens, whole.tokens)
                assert isinstance(update.batch, dict) or np.array_equal(
                    update.batch.counts, whole.batch.counts
                )
                used, read = 0, set()
                for part in parts_of(update.batch):
                    real = part["segments"] > 0
                    used += real.sum()
                    read |= {*part["tokens"][real].tolist(), *part["targets"][real].tolist()} - {-1}
                # Every id of its rows once, and the one after a row where its document goes on.
                assert set(places.tolist()) == read
                rows = sum(len(part["rows"]) for part in parts_of(update.batch))
                assert used <= len(places) <= used + rows


def test_every_process_evaluates_as_many_batches(configs, processes):
    """And of one shape: one that had fewer would let the others wait for ever."""
    for kind, config in configs.items():
        batches = list(load_data(config).validation.batches(4))
        shapes = [found[kind, "evaluated"] for found in processes]
        assert shapes == [[(4, LENGTH)] * len(batches)] * 4
        assert len(batches) > 3
