"""How fast updates are made from a store, and how level they are."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardlm.bench.report import Say, Table
from shardlm.bench.synthetic import document_lengths, random_texts, write_rows
from shardlm.config import Config, DataConfig, ModelConfig, TrainConfig
from shardlm.data import Corpus, Loader, Preparation, Store
from shardlm.data.balance import WorkModel, imbalance
from shardlm.data.inputs import list_inputs
from shardlm.data.loader import Shape
from shardlm.data.readers import Reading
from shardlm.data.tokenizer import BytesTokenizer

WAYS = 8
"""Devices that rows are dealt to."""
PACKINGS = ("concat", "best_fit", "padded_buckets")
MODEL = ModelConfig(layers=12, embed=768, heads=12, mlp=3072, vocab=32_768)
"""What rows cost: at 4,096 tokens attention is a third of it."""


UPDATES = (Shape(4096, 16), Shape(1024, 64), Shape(128, 512), Shape(128, 16))
DOCUMENTS = 50_000
"""Of the store: some 30 million ids."""


def synthetic_store(directory: Path, documents: int) -> Store:
    """A store of documents of random letters."""
    rows = write_rows(directory / "letters.jsonl", random_texts(document_lengths(documents)))
    preparation = Preparation(list_inputs(str(rows)), Reading(), BytesTokenizer())
    return preparation.into(directory / "letters")


def loader_of(corpus: Corpus, update: Shape, **data: Any) -> Loader:
    """A loader for `WAYS` devices, the update in one micro-batch."""
    config = Config(
        data=DataConfig(length=update.length, **data), train=TrainConfig(batch=update.rows)
    )
    loader = Loader([corpus], config, WorkModel.of(MODEL))
    loader.deal_to(WAYS)
    return loader


def loading(directory: Path, rounds: int, say: Say, seconds: float = 0.05) -> dict[str, Any]:
    """Tokens a second of the loader alone, by `Loader.at` and by `Loader.iterate`: the median over
    rounds of `seconds` each. Padding is not counted."""
    (corpus,) = Corpus.of_stores([synthetic_store(directory, DOCUMENTS)], ["letters"])
    table = Table(("update", "packing", "balance", "at, tokens/s", "iterate, tokens/s"))
    figures: dict[str, Any] = {}
    for update in UPDATES:
        for packing in PACKINGS:
            for balance in ("none", "work"):
                loader = loader_of(corpus, update, packing=packing, balance=balance)
                found = rates(loader, update, rounds, seconds)
                figures[f"{update} {packing} {balance}"] = found
                table.add(str(update), packing, balance, *(f"{r:,.0f}" for r in found.values()))
    say(str(table))
    return figures


def rates(loader: Loader, update: Shape, rounds: int, seconds: float) -> dict[str, float]:
    """Tokens a second of each way to get updates."""
    tokens = update.places * (1 - loader.padding)
    updates = loader.iterate()
    step = 0

    def at() -> None:
        nonlocal step
        loader.at(step)
        step += 1

    ways = {"at": at, "iterate": lambda: next(updates)}
    try:
        found: dict[str, list[float]] = {name: [] for name in ways}
        for name, make in ways.items():
            make()
            for _ in range(rounds):
                found[name].append(_calls_per_second(make, seconds) * tokens)
    finally:
        updates.close()
    return {f"{name}_tokens_per_second": statistics.median(r) for name, r in found.items()}


def _calls_per_second(call: Callable[[], Any], seconds: float) -> float:
    calls, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < seconds:
        call()
        calls += 1
    return calls / taken


def balancing(
    say: Say, documents: int = 20_000, updates: int = 100, rows: tuple[int, ...] = (16, 128)
) -> dict[str, Any]:
    """The work of the device with most over that of the mean, mean and worst of many updates of
    rows of 4,096, and the share of padding by packing. The same figures in every run."""
    corpus = Corpus.of(
        (np.zeros(n, np.uint8) for n in document_lengths(documents).tolist()), vocab_size=256
    )
    figures: dict[str, Any] = {"max_over_mean": {}, "padding": {}}
    table = Table(("update", "balance", "most over mean work", "worst"))
    for update in (Shape(4096, n) for n in rows):
        for balance in ("none", "tokens", "work"):
            loader = loader_of(corpus, update, packing="best_fit", balance=balance)
            found = [imbalance(loader.at(step).work) for step in range(updates)]
            mean, worst = statistics.mean(found), max(found)
            figures["max_over_mean"][f"{update} {balance}"] = {"mean": mean, "worst": worst}
            table.add(str(update), balance, f"{mean:.4f}", f"{worst:.4f}")
    say(str(table))
    table = Table(("packing", "padding"))
    for packing in (*PACKINGS, "none"):
        padding = loader_of(corpus, Shape(4096, max(rows)), packing=packing).padding
        figures["padding"][packing] = padding
        table.add(packing, f"{padding:.2%}")
    say(str(table))
    return figures
