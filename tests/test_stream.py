"""Streams: every row once, in an order that depends on the stream alone, also after a resume."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import threading
import time

import datasets
import numpy as np
import pytest
from distributed import run_distributed, wait_until
from engines import raised_by, start_hydra, write_profile
from models import VOCAB_SIZE, tiny

from ds_hydra.errors import HydraConfigError, HydraDataError
from ds_hydra.sampler.data import stream as stream_module
from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.sampler.data.stream import RowReading, StreamReader, StreamSampler

READING = RowReading(
    context_length=20,
    over_length="truncate",
    text_column="text",
    tokenize=None,
    num_inputs=VOCAB_SIZE,
    num_labels=VOCAB_SIZE,
)
NUM_ROWS = 150


def rows(num_rows=NUM_ROWS, first=0):
    """Rows that say which one they are."""
    for index in range(first, first + num_rows):
        length = 2 + index * 7 % 11
        yield {"input_ids": [index // 200, index % 200] + [3] * length}


def generated(num_rows=NUM_ROWS, first=0):
    return datasets.IterableDataset.from_generator(
        rows, gen_kwargs={"num_rows": num_rows, "first": first}
    )


def text_of(index):
    return chr(97 + index % 26) * (2 + index % 5)


def tokenize(texts):
    return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def shards(names):
    for name in names:
        yield from rows(50, 50 * name)


def streams():
    """Streams of all kinds, with the number of their rows."""
    halves = [generated(75), generated(75, 75)]
    yield "generator", generated(), NUM_ROWS
    yield "dataset", datasets.Dataset.from_list(list(rows())).to_iterable_dataset(4), NUM_ROWS
    mixed = datasets.interleave_datasets(halves, [0.7, 0.3], seed=3)
    yield "interleaved", mixed, len(list(mixed))
    yield "concatenated", datasets.concatenate_datasets(halves), NUM_ROWS
    yield "shuffled", generated().shuffle(seed=5, buffer_size=40), NUM_ROWS
    inside = generated().shuffle(seed=5, buffer_size=40).map(dict).filter(lambda row: True)
    yield "shuffled inside", datasets.concatenate_datasets([inside]), NUM_ROWS
    yield "mapped", generated().map(dict).filter(lambda row: True), NUM_ROWS
    files = datasets.IterableDataset.from_generator(shards, gen_kwargs={"names": [0, 1, 2]})
    yield "shards", files.shuffle(seed=1, buffer_size=1), NUM_ROWS


STREAMS = {name: (stream, num_rows) for name, stream, num_rows in streams()}


def sampler_of(stream, *, window_tokens=200, budget=60, shuffle=True, seed=4, **settings):
    reading = dataclasses.replace(READING, **settings)
    reader = StreamReader(stream, reading, window_tokens=window_tokens, seed=seed, shuffle=shuffle)
    return StreamSampler(reader, budget)


def row_of(tokens):
    return int(tokens[0]) * 200 + int(tokens[1])


def train_all(sampler, limit=10_000):
    """The rows of each iteration until the stream ends, and what that says."""
    seen = []
    for _ in range(limit):
        try:
            batch, _ = sampler.draw(sampler.state)
        except HydraDataError as error:
            return seen, str(error)
        pairs = [sampler[index] for index in batch.sample_indices]
        assert batch.lengths == tuple(len(input_ids) for input_ids, _ in pairs)
        assert sum(batch.lengths) <= 60 or len(batch.lengths) == 1
        seen.append([row_of(input_ids) for input_ids, _ in pairs])
        sampler.advance(len(batch.lengths))
        sampler.forget_before(batch.iteration + 1)
    return seen, ""


def flat(seen):
    return [row for drawn in seen for row in drawn]


@pytest.mark.parametrize("name", STREAMS)
def test_every_row_is_drawn_once_also_after_a_resume_anywhere(name):
    stream, num_rows = STREAMS[name]
    sampler = sampler_of(stream)
    whole, text = train_all(sampler)
    assert (
        f"the stream has ended: its {num_rows} sequences are trained, in {len(whole)} iter" in text
    )
    assert "stream.repeat(2)" in text
    wanted = [row_of(row["input_ids"]) for row in stream]
    assert sorted(flat(whole)) == sorted(wanted)
    assert flat(whole) != wanted, "shuffled"
    assert not sampler._sequences
    for stop in sorted({0, 1, 5, len(whole) // 2, len(whole) - 1, len(whole)}):
        sampler = sampler_of(stream)
        before, _ = train_all(sampler, stop)
        ahead = sampler.state
        for _ in range(min(4, len(whole) - stop)):  # as planning does
            _, ahead = sampler.draw(ahead)
        state = copy.deepcopy(sampler.state_dict(stop))
        sampler.close()
        resumed = sampler_of(stream)
        resumed.first_window()
        resumed.load_state_dict(state)
        after, _ = train_all(resumed)
        assert before + after == whole, stop


def test_the_order_is_that_of_the_stream_without_shuffle_and_of_the_seed_with_it():
    plain, _ = train_all(sampler_of(generated(), shuffle=False))
    assert flat(plain) == list(range(NUM_ROWS))
    dataset = TokenBudgetSampler(
        [len(row["input_ids"]) for row in rows()], np.ones(NUM_ROWS), 60, shuffle=False
    )
    until = [list(next(dataset).sample_indices) for _ in plain[:-1]]
    assert plain[:-1] == until, "the rule of a dataset"
    shuffled = [flat(train_all(sampler_of(generated(), seed=seed))[0]) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]


def test_the_windows_do_not_depend_on_how_fast_the_stream_is():
    def slow():
        for index, row in enumerate(rows()):
            time.sleep(0.002 * (index % 3))
            yield row

    fast, _ = train_all(sampler_of(generated()))
    assert train_all(sampler_of(datasets.IterableDataset.from_generator(slow)))[0] == fast


def test_what_is_ahead_is_bounded_and_asked_for_without_waiting(monkeypatch):
    is_open, count, puts = threading.Event(), [], []
    put = stream_module._Run._put

    def noted(run, result):
        puts.append(run)
        put(run, result)
        puts.append(None)

    def gated():
        for index, row in enumerate(rows(5000)):
            if index == 64:
                is_open.wait()
            count.append(index)
            yield row

    monkeypatch.setattr(stream_module._Run, "_put", noted)
    sampler = sampler_of(datasets.IterableDataset.from_generator(gated))
    sampler.first_window()
    state = sampler.state
    while sampler.can_draw(state):
        _, state = sampler.draw(state)
    assert state.iteration >= 3
    assert len(count) == 64
    is_open.set()
    _, state = sampler.draw(state)
    wait_until(lambda: puts[-1] is not None and puts[-1].results.full())  # and so it waits
    assert len(count) < 64 + 4 * 32, "one window is trained, one waits, one is read"
    sampler.close()
    assert not any(thread.name == "ds_hydra-stream" for thread in threading.enumerate())


def test_texts_are_tokenised_and_long_rows_cut_dropped_or_refused():
    texts = [{"text": text_of(index)} for index in range(70)]
    stream = datasets.Dataset.from_list(texts).to_iterable_dataset()
    sampler = sampler_of(stream, tokenize=tokenize, shuffle=False)
    found = [sampler[i][0].tolist() for b in batches_of(sampler) for i in b.sample_indices]
    assert found == [[ord(letter) for letter in text_of(index)] for index in range(70)]
    long = datasets.IterableDataset.from_generator(
        lambda: ({"input_ids": [1] * n} for n in (30, 1, 9))
    )
    cut, _ = drawn_lengths(sampler_of(long))
    assert sorted(cut) == [9, 20]
    assert drawn_lengths(sampler_of(long, over_length="drop"))[0] == [9]
    with pytest.raises(HydraConfigError, match=r"row 0 of the stream has 30 tokens.*over_length"):
        sampler_of(long, over_length="refuse").first_window()


def batches_of(sampler):
    while True:
        try:
            batch = next(sampler)
        except HydraDataError:
            return
        yield batch


def drawn_lengths(sampler):
    batches = list(batches_of(sampler))
    return [length for batch in batches for length in batch.lengths], batches


def streamed(examples):
    return datasets.IterableDataset.from_generator(lambda: iter(examples))


BODY = {"body": "a b"}


def stream_of(*examples):
    def give():
        yield from rows(40)
        for example in examples:
            if isinstance(example, Exception):
                raise example
            yield example

    return datasets.IterableDataset.from_generator(give)


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (stream_of({"ids": [1]}), "row 40 of the stream has keys.*expected 'input_ids'"),
        (streamed([BODY]), "row 0 of the stream has neither .* 'text', but the columns body; set hydra.text_col"),
        (streamed([{"text": "a b"}]), "there is no tokenizer; set hydra.tokenizer"),
        (stream_of({"input_ids": [1, VOCAB_SIZE]}), f"row 40 of the stream has {VOCAB_SIZE} in its input_ids"),
        (stream_of({"input_ids": [1, 2], "labels": [-5, 1]}), "row 40 of the stream has -5 in its labels"),
        (streamed([]), "the stream is empty"),
        (stream_of({"input_ids": [1, 2], "loss_mask": [0, 1]}), "'loss_mask', which is not used"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_trained_are_named(stream, text):
    sampler = sampler_of(stream)
    with pytest.raises(HydraConfigError, match=text):
        train_all(sampler, limit=10 * bool(sampler.first_window()))


def test_a_source_that_fails_is_named_once_the_rows_before_are_trained():
    sampler = sampler_of(stream_of(OSError("connection lost")), budget=30)
    seen, text = train_all(sampler)
    assert "the stream raised OSError after row 40: connection lost" in text
    assert "resume from the last checkpoint" in text
    left = [row_of(input_ids) for input_ids, _ in sampler._sequences.values()]
    assert sorted(flat(seen) + left) == list(range(40))
    assert len(left) < 5, "an incomplete global batch is not trained"


def test_a_stream_without_sequences_does_not_read_for_ever(monkeypatch):
    monkeypatch.setattr(stream_module, "_FRUITLESS_ROWS", 64)
    endless = datasets.IterableDataset.from_generator(lambda: iter(lambda: {"input_ids": [1]}, 0))
    with pytest.raises(HydraDataError, match="no sequence is left of rows 0 to 64 of the stream"):
        sampler_of(endless).first_window()


def test_a_slow_source_is_named(monkeypatch, caplog):
    monkeypatch.setattr(stream_module, "_PATIENCE_S", 0.05)

    def late():
        time.sleep(0.3)
        yield from rows(40)

    sampler_of(datasets.IterableDataset.from_generator(late)).first_window()
    assert "training has waited 0 s for rows of the stream" in caplog.text


def test_rows_that_another_reading_gives_otherwise_are_found():
    numbers = random.Random(3)

    def unsure():
        for row in rows():
            yield {"input_ids": row["input_ids"][:2] + [numbers.randrange(VOCAB_SIZE)] * 5}

    stream = datasets.IterableDataset.from_generator(unsure)
    sampler = sampler_of(stream)
    train_all(sampler, 3)
    state = sampler.state_dict()
    resumed = sampler_of(stream)
    resumed.load_state_dict(state)
    _, text = train_all(resumed)
    assert "of the stream are not those that were read before the checkpoint" in text
    assert "load_data_position=False" in text


def test_a_position_in_a_dataset_is_none_in_a_stream():
    dataset = TokenBudgetSampler([3, 4], [2, 3], 4)
    stream = sampler_of(generated())
    with pytest.raises(
        HydraConfigError, match=r"taken with a datasets\.Dataset, and the training da"
    ):
        stream.load_state_dict(dataset.state_dict())
    with pytest.raises(HydraConfigError, match="taken with a stream"):
        dataset.load_state_dict(stream.state_dict())


# ---- With an engine


def start(folder, stream, **hydra):
    own = {
        "profile": write_profile(folder),
        "tokens_per_iteration": 150,
        "stream_window": 2,
        "strategies": None,
        "planner": {"num_workers": 0},
    }
    return start_hydra(tiny("llama_tied"), hydra=own | hydra, training_data=stream)


def train(engine, num_iterations):
    """Losses, and the rows that were trained."""
    losses, seen = [], []
    share = engine.source._share

    def watching(plan):
        received = share(plan)
        seen.append([row_of(received[position][0]) for position in range(len(plan.lengths))])
        return received

    engine.source._share = watching
    for _ in range(num_iterations):
        losses.append(float(engine.train_batch()))
    engine.source._share = share
    return losses, seen


def train_a_stream(folder):
    """Uninterrupted, to the end; and the first part of a run that is resumed."""
    engine = start(folder, generated())
    whole = train(engine, 8)
    engine.save_checkpoint(f"{folder}/saved", tag="eight")
    rest = train(engine, 2)
    kind, end = raised_by(lambda: [engine.train_batch() for _ in range(20)])
    taken = raised_by(lambda: next(iter(engine.training_dataloader)))[1]
    engine.destroy()
    engine = start(folder, generated())
    first = train(engine, 3)
    engine.save_checkpoint(f"{folder}/saved", tag="three")
    engine.destroy()
    return whole, rest, first, (kind.__name__, end, taken)


def resume_a_stream(folder):
    engine = start(folder, generated())
    engine.load_checkpoint(f"{folder}/saved", tag="three")
    second = train(engine, 2)
    engine.save_checkpoint(f"{folder}/saved", tag="five")
    train(engine, 2)  # lost
    engine.load_checkpoint(f"{folder}/saved", tag="five")
    third = train(engine, 3)
    engine.load_checkpoint(f"{folder}/saved", tag="three", load_data_position=False)
    anew = train(engine, 2)
    engine.destroy()
    return second, third, anew


@pytest.mark.distributed
def test_a_stream_is_resumed_with_the_next_row(tmp_path):
    folder = str(tmp_path)
    ranks = run_distributed(train_a_stream, 2, folder)
    (losses, seen), (_, last), first, (kind, end, taken) = ranks[0]
    assert ranks[1][0] == (losses, seen), "all ranks train the same"
    rows_seen = flat(seen + last)
    assert len(rows_seen) == len(set(rows_seen))
    assert first == (losses[:3], seen[:3])
    assert kind == "HydraDataError"
    assert "the stream has ended: its 150 sequences are trained" in end
    assert "call engine.train_batch() without a batch" in taken
    second, third, anew = run_distributed(resume_a_stream, 2, folder)[0]
    assert second[1] + third[1] == seen[3:8]
    assert second[0] + third[0] == losses[3:8]
    assert anew[1] == seen[:2]


def fail_to_read(folder):
    empty = streamed([])
    texts = [raised_by(functools.partial(start, folder, s)) for s in (empty, streamed([BODY]))]
    engine = start(folder, stream_of(OSError("connection lost")))
    return [*texts, raised_by(lambda: [engine.train_batch() for _ in range(50)])]


@pytest.mark.distributed
def test_what_is_wrong_with_a_stream_is_raised_on_all_ranks(tmp_path):
    for found in run_distributed(fail_to_read, 2, str(tmp_path)):
        texts = [text for _, text in found]
        assert "the stream is empty" in texts[0]
        assert "row 0 of the stream has neither 'input_ids' nor a text" in texts[1]
        assert "the stream raised OSError after row 40: connection lost" in texts[2]
