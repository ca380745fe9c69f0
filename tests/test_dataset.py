import errno
import functools
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from datasets import (
    Array2D,
    Dataset,
    DatasetDict,
    Features,
    LargeList,
    Sequence,
    Value,
    config,
    load_dataset,
    load_from_disk,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ds_hydra.errors import HydraConfigError, HydraDataError
from ds_hydra.sampler.data import dataset as dataset_module
from ds_hydra.sampler.data.dataset import TokenDataset

WORDS = ["<eos>", "<unk>", "a", "b", "c", "d"]
TEXTS = ["a b c", "b", "", "d d d d d d d d", None, "c a"]
EOS = 0


def make_tokenizer() -> Tokenizer:
    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.fixture
def tokenize():
    return PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), eos_token="<eos>", unk_token="<unk>"
    )


def from_ids(rows, context_length=8, **kwargs):
    return TokenDataset.from_dataset(
        Dataset.from_dict({"input_ids": rows}), context_length=context_length, **kwargs
    )


def assert_row(row, input_ids, labels=None):
    np.testing.assert_array_equal(row["input_ids"], input_ids)
    np.testing.assert_array_equal(row["labels"], input_ids if labels is None else labels)
    assert row["input_ids"].dtype == row["labels"].dtype == np.int64


def test_texts_are_tokenised_and_end_with_eos(tokenize):
    dataset = TokenDataset.from_dataset(
        Dataset.from_dict({"text": TEXTS, "source": ["x"] * 6}),
        context_length=16,
        tokenize=tokenize,
    )
    assert dataset.lengths.tolist() == [4, 2, 9, 3]
    assert dataset.num_label_tokens.tolist() == [3, 1, 8, 2]
    assert dataset.report.num_without_label == 2, "the empty text and the null have an eos only"
    assert_row(dataset[0], [2, 3, 4, EOS])
    assert_row(dataset[3], [4, 2, EOS])


def test_an_end_of_text_is_not_doubled(tokenize):
    texts = Dataset.from_dict({"text": ["a b", "a b <eos>"]})
    ended = TokenDataset.from_dataset(texts, context_length=16, tokenize=tokenize)
    assert ended.lengths.tolist() == [3, 3]


def test_a_text_that_has_a_begin_of_its_own_gets_no_second_one(tokenize):
    texts = Dataset.from_dict({"text": ["a b", "<unk> a b", "b b", "<unk> <unk> a b"]})
    backend = tokenize.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", WORDS.index("<unk>"))]
    )
    made = TokenDataset.from_dataset(texts, context_length=16, tokenize=tokenize)
    begun = [row["input_ids"].tolist() for row in made]
    assert begun == [[1, 2, 3, EOS], [1, 2, 3, EOS], [1, 3, 3, EOS], [1, 1, 2, 3, EOS]]
    backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    made = TokenDataset.from_dataset(texts, context_length=16, tokenize=tokenize)
    assert made[2]["input_ids"].tolist() == [3, 3, EOS], "no begin, and words may be equal"


@pytest.mark.parametrize("per_batch", [1, 1 << 20])
def test_long_texts_are_tokenised_few_at_once(monkeypatch, tokenize, per_batch):
    monkeypatch.setattr("ds_hydra.sampler.data.dataset._TEXT_BYTES_PER_BATCH", per_batch)
    seen = []

    def counted(texts):
        seen.append(len(texts))
        return tokenize(texts)

    texts = Dataset.from_dict({"text": ["a b", "c d"]})
    data = TokenDataset.from_dataset(texts, context_length=9, tokenize=counted)
    assert (data.lengths.tolist(), seen) == ([2, 2], [1, 1] if per_batch == 1 else [2])


def test_tokenising_happens_once(tmp_path, tokenize):
    """A second reading, even with another context, comes from the cache of `datasets`."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a b c"}\n{"text": "c a"}\n')
    texts = Dataset.from_json(str(path), cache_dir=str(tmp_path / "cache"))
    TokenDataset.from_dataset(texts, context_length=16, tokenize=tokenize)
    files = sorted((tmp_path / "cache").rglob("cache-*.arrow"))
    TokenDataset.from_dataset(texts, context_length=2, tokenize=tokenize)
    assert len(files) == 1
    assert sorted((tmp_path / "cache").rglob("cache-*.arrow")) == files


@pytest.fixture
def read_only(monkeypatch):
    """Folders in which nobody may write, as on a mount that is read-only."""
    folders = []
    real = tempfile.NamedTemporaryFile

    def refuse(*args, dir=None, **kwargs):
        if any(Path(dir).is_relative_to(folder) for folder in folders):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), dir)
        return real(*args, dir=dir, **kwargs)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    return folders


def test_tokens_of_a_read_only_dataset_are_in_the_users_cache(
    tmp_path, monkeypatch, read_only, tokenize
):
    folder, cache = tmp_path / "corpus", tmp_path / "cache"
    Dataset.from_dict({"text": TEXTS}).save_to_disk(folder)
    before = sorted(folder.iterdir())
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", cache)

    def read(tokenize=tokenize):
        return TokenDataset.from_dataset(
            load_from_disk(folder), context_length=16, tokenize=tokenize
        )

    read_only.append(folder)
    assert read().lengths.tolist() == [4, 2, 9, 3]
    made = sorted(cache.rglob("*.arrow"))
    assert len(made) == 1
    stamps = [path.stat().st_mtime_ns for path in made]
    assert read().lengths.tolist() == [4, 2, 9, 3]
    assert [path.stat().st_mtime_ns for path in made] == stamps, "other ranks find it"
    assert sorted(folder.iterdir()) == before
    read_only.append(cache)
    with pytest.raises(HydraDataError, match=f"into {folder}, nor .* set HF_DATASETS_CACHE"):
        read(lambda texts: {"input_ids": [[1, 2]] * len(texts)})


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([-100, 1, 2]), max_size=12), min_size=1, max_size=12),
    st.integers(2, 10),
)
def test_labels_are_those_within_the_context_and_count_where_they_are_predicted(
    labels, context_length
):
    labels = [*labels, [7, 7]]
    rows = Dataset.from_dict({"input_ids": [[9] * len(row) for row in labels], "labels": labels})
    dataset = TokenDataset.from_dataset(rows, context_length=context_length)
    cut = [row[:context_length] for row in labels]
    expected = [sum(label != -100 for label in row[1:]) for row in cut]
    assert dataset.num_label_tokens.tolist() == [count for count in expected if count]
    kept = [row for row, count in zip(cut, expected, strict=True) if count]
    assert [row["labels"].tolist() for row in dataset] == kept
    assert dataset.report.num_without_label == len(labels) - len(kept)


def test_long_rows_are_cut_or_dropped_and_counted():
    rows = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12], [13]]
    cut = from_ids(rows, context_length=3)
    assert cut.lengths.tolist() == [3, 3, 3]
    assert_row(cut[0], [1, 2, 3])
    assert (cut.report.num_truncated, cut.report.num_cut_tokens) == (2, 3)
    dropped = from_ids(rows, context_length=3, over_length="drop")
    assert dropped.lengths.tolist() == [3]
    assert_row(dropped[0], [6, 7, 8])
    assert (dropped.report.num_dropped, dropped.report.num_without_label) == (2, 1)
    with pytest.raises(HydraConfigError, match=r"1 are longer than hydra.context_length 2; set"):
        from_ids([[1, 2, 3], [1]], context_length=2, over_length="drop")
    with pytest.raises(ValueError, match="read-only"):
        cut.lengths[0] = 5


@pytest.mark.parametrize("over_length", ["truncate", "drop", "refuse"])
def test_every_row_is_kept_whole_for_who_wants_an_answer_for_each(over_length):
    rows = Dataset.from_dict(
        {
            "input_ids": [[1, 2, 3, 4], [5], [], [6, 7]],
            "labels": [[1, 2, 3, 4], [5], [], [-100, -100]],
        }
    )
    whole = TokenDataset.from_dataset(
        rows, context_length=3, over_length=over_length, every_row=True
    )
    assert [row["input_ids"].tolist() for row in map(whole.__getitem__, range(4))] == [
        [1, 2, 3, 4],
        [5],
        [],
        [6, 7],
    ]
    assert whole.num_label_tokens.tolist() == [3, 0, 0, 0]
    assert not whole.report.is_partial
    partial = TokenDataset.from_dataset(rows, context_length=3)
    assert (len(partial), partial.report.is_partial) == (1, True)


def test_refuse_names_the_row_and_both_ways_out():
    rows = [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    with pytest.raises(HydraConfigError) as caught:
        from_ids(rows, context_length=3, over_length="refuse")
    for part in ("row 1", "5 tokens", "hydra.context_length 3", "2 rows", "over_length", "to 5"):
        assert part in str(caught.value)
    assert from_ids(rows, context_length=5, over_length="refuse").report.num_truncated == 0


def test_report_prints_what_was_cut_and_left_out():
    report = from_ids([[1] * 1500, [1, 2, 3], [1]], context_length=1000).report
    assert str(report) == (
        "2 sequences, 1,003 tokens, mean 502, longest 1,000\n"
        "1 truncated to 1,000 tokens (500 tokens cut, 33.3%)\n"
        "1 left out, without a token to predict"
    )
    dropped = from_ids([[1] * 1500, [1, 2, 3]], context_length=1000, over_length="drop").report
    assert str(dropped).endswith("1 dropped, longer than 1,000 tokens")
    other = TokenDataset.from_dataset(beside_ids(id=[1, 2], url=["", ""]), context_length=8).report
    assert str(other).endswith("columns that nothing reads: id, url")


def test_a_row_beyond_the_first_read_is_named(monkeypatch):
    monkeypatch.setattr("ds_hydra.sampler.data.dataset._ROWS_PER_READ", 3)
    rows = Dataset.from_dict({"input_ids": [[1, 2]] * 5, "labels": [[1, 2]] * 4 + [[1]]})
    with pytest.raises(HydraConfigError, match="row 4 has 2 input_ids and 1 labels"):
        TokenDataset.from_dataset(rows, context_length=99)


def test_a_read_is_bounded_by_tokens(monkeypatch):
    """Of rows that are long, and of those that were selected, of which few are read at once."""
    monkeypatch.setattr("ds_hydra.sampler.data.dataset._TOKENS_PER_READ", 8)
    rows = Dataset.from_dict({"input_ids": [[1] * n for n in (2, 3, 3, 20, 9, 1, 1, 8)]})
    for data in (rows, rows.select(range(7, -1, -1))):
        tables = list(dataset_module._read_tables(data, ("input_ids",)))
        sizes = [[len(ids) for ids in table["input_ids"].to_pylist()] for table in tables]
        assert list(itertools.chain(*sizes)) == [len(ids) for ids in data["input_ids"]]
        assert all(sum(n) <= 8 or len(n) == 1 for n in sizes)
        assert len(sizes) <= 6
        read = TokenDataset.from_dataset(data, context_length=99)
        assert read.lengths.tolist() == [n for n in list(itertools.chain(*sizes)) if n > 1]


@pytest.mark.parametrize(
    ("rows", "features"),
    [
        ([[1, 2], None, [3, 4]], Sequence(Value("int32"), length=2)),
        ([[[1, 2]], None, [[3, 4]]], None),
        ([[[1, 2]], [[3, 4]]], Array2D((1, 2), "int32")),
        ([[1, 2], [], [3, 4]], LargeList(Value("int64"))),
    ],
)
def test_lists_of_every_kind_are_read(rows, features):
    features = features and Features({"input_ids": features, "labels": features})
    data = Dataset.from_dict({"input_ids": rows, "labels": rows}, features=features)
    for chosen in (data, data.select(range(len(rows)))):
        dataset = TokenDataset.from_dataset(chosen, context_length=8)
        assert dataset.lengths.tolist() == [2, 2]
        assert_row(dataset[1], [3, 4])
        dataset.check_vocabulary(5, 5)
        with pytest.raises(HydraConfigError, match=f"row {len(rows) - 1} of the dataset has 4"):
            dataset.check_vocabulary(4, 4)


def from_columns(**columns):
    return Dataset.from_dict(columns)


def beside_ids(**columns):
    return from_columns(input_ids=[[1, 2], [3, 4, 5]], **columns)


def test_rows_are_converted_as_given_examples_are():
    """Padding is taken away and masks count, whatever stands beside them."""
    rows = {
        "input_ids": [[9, 9, 1, 2, 3], [4, 5, 9], [9, 9], None],
        "attention_mask": [[0, 0, 1, 1, 1], [1, 1, 0], [0, 0], None],
        "completion_mask": [[0, 0, 0, 1, 1], [0, 1, 0], [0, 0], None],
        "source": ["a", "b", "c", "d"],
    }
    dataset = TokenDataset.from_dataset(Dataset.from_dict(rows), context_length=8)
    assert dataset.lengths.tolist() == [3, 2]
    assert dataset.num_label_tokens.tolist() == [2, 1]
    assert_row(dataset[0], [1, 2, 3], [-100, 2, 3])
    assert_row(dataset[1], [4, 5], [-100, 5])
    assert dataset.report.num_without_label == 2


def test_labels_that_go_with_the_padding_are_counted():
    """Elsewhere they train what comes after a text, often its end."""
    ids = [[1, 2, 9, 9], [3, 4, 5, 9]]
    rows = from_columns(input_ids=ids, labels=ids, attention_mask=[[1, 1, 0, 0], [1, 1, 1, 0]])
    report = TokenDataset.from_dataset(rows, context_length=8).report
    assert report.is_partial
    assert "3 labels other than -100 left out with the padding" in str(report)
    masked = rows.map(lambda row: {"labels": np.where(row["attention_mask"], row["labels"], -100)})
    assert not TokenDataset.from_dataset(masked, context_length=8).report.is_partial


def test_columns_that_say_nothing_convert_no_row(monkeypatch):
    monkeypatch.setattr("ds_hydra.sampler.data.dataset.to_example", None)
    monkeypatch.setattr("ds_hydra.sampler.data.dataset._ROWS_PER_READ", 1)
    rows = beside_ids(
        attention_mask=[[True, True], [True, True, True]],
        position_ids=[[0, 1], [0, 1, 2]],
        token_type_ids=[[0, 0], [0, 0, 0]],
    )
    dataset = TokenDataset.from_dataset(rows, context_length=8)
    assert_row(dataset[1], [3, 4, 5])


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_the_first_token_outside_the_vocabulary_is_named(monkeypatch, column):
    monkeypatch.setattr("ds_hydra.sampler.data.dataset._ROWS_PER_READ", 2)
    rows = {
        "input_ids": [[1, 2], [3, 4], [5, 6], [7, 8]],
        "labels": [[-100, 2], [3, 4], [5, 6], [7, 8]],
    }
    rows[column][2] = [5, 64]
    rows[column][3] = [99, 8]
    dataset = TokenDataset.from_dataset(Dataset.from_dict(rows), context_length=8)
    sizes = {"input_ids": 64, "labels": 64}
    with pytest.raises(
        HydraConfigError, match=f"row 2 of the dataset has 64 in its {column}.* has 64 tokens"
    ):
        dataset.check_vocabulary(*sizes.values())
    sizes[column] = 100  # embedding and head may have other numbers of rows
    dataset.check_vocabulary(*sizes.values())
    both = from_ids([[1, 64]])  # which are labels, too
    both.check_vocabulary(100, 65)
    with pytest.raises(HydraConfigError, match="row 0 of the dataset has 64"):
        both.check_vocabulary(100, 64)


text = Dataset.from_dict({"text": ["a b"], "title": ["t"]})
BAD_DATA = [
    (Dataset.from_dict({"text": []}), "dataset is empty"),
    (
        text.rename_column("text", "body"),
        "text column 'text', but the columns body, title; set hydra.text_column",
    ),
    (Dataset.from_dict({"text": [1, 2]}), "holds Value\\('int64'\\), expected text"),
    (text, "no tokenizer; set hydra.tokenizer"),
    (
        DatasetDict(train=text, test=text),
        r"splits train, test; give one, such as dataset\['train'\]",
    ),
    ([[1, 2]], "is a list, expected a datasets.Dataset"),
    (text.to_iterable_dataset(), "is a IterableDataset, expected"),
    (Dataset.from_dict({"input_ids": [[1], []]}), "2 rows is left: 2 have no token to predict"),
    (Dataset.from_dict({"input_ids": ["a b"]}), "column 'input_ids' holds string, expected lists"),
    (
        Dataset.from_dict({"input_ids": [[1, 2]], "labels": [3]}),
        "column 'labels' holds int64, expected lists",
    ),
    (
        Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]}),
        "row 1 has 2 input_ids and 1 labels",
    ),
    (beside_ids(labels=[[1, 2], [-1, 4, 5]]), "row 1 of the dataset has -1 in its labels.*or -100"),
    (beside_ids(labels=[[-200, 2], [3, 4, 5]]), "row 0 of the dataset has -200 in its labels"),
    (from_columns(input_ids=[[1, 2], [-100, 4]]), "row 1 of the dataset has -100 in its input_ids"),
    (from_columns(input_ids=[[1, 2], [3, None]]), "column 'input_ids' holds nulls"),
    (from_columns(input_ids=[[1.0, 2.5]]), "column 'input_ids' holds list<.*double>"),
    (beside_ids(position_ids=[[0, 1], [0, 1, 0]]), "'position_ids' of row 1 of the dataset are 0"),
    (beside_ids(prompt_length=[1, 1]), "the dataset has 'prompt_length'.*'completion_mask'"),
    (from_columns(text=["a"], loss_mask=[[1]]), "'loss_mask' beside texts or chats"),
    (
        from_columns(conversations=[[{"from": "human", "value": "a"}]]),
        "tokenise chats before, .* {% generation %} .*HydraSFTTrainer, or set hydra.text_column",
    ),
]


@pytest.mark.parametrize(("dataset", "message"), BAD_DATA)
def test_unusable_data_is_a_config_error(dataset, message):
    with pytest.raises(HydraConfigError, match=message):
        TokenDataset.from_dataset(dataset, context_length=8)


def test_rows_that_are_computed_when_they_are_read_are_refused():
    def transform(batch):
        return {"input_ids": [row[:2] for row in batch["input_ids"]]}

    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]})
    assert from_ids([[1, 2, 3]]).lengths.tolist() == [3]
    for read in (functools.partial(TokenDataset.from_dataset, context_length=9), as_rows):
        with pytest.raises(HydraConfigError, match=r"set_transform.*\.map\(transform, batched"):
            read(rows.with_transform(transform))
        read(rows.with_format("torch", columns=["input_ids"]))
    stored = rows.with_transform(transform).with_format(None).map(transform, batched=True)
    assert TokenDataset.from_dataset(stored, context_length=9).lengths.tolist() == [2, 2]


def test_columns_that_a_format_hides_are_not_read():
    rows = Dataset.from_dict(
        {"input_ids": [[1, 2, 3]], "labels": [[-100, -100, 3]], "loss_mask": [[0, 0, 1]]}
    )
    hidden = rows.with_format("torch", columns=["input_ids"])
    for dataset in (hidden, as_rows(hidden)):
        assert_row(TokenDataset.from_dataset(dataset, context_length=9)[0], [1, 2, 3])
    shown = rows.remove_columns("loss_mask").with_format(
        "torch", columns=["input_ids"], output_all_columns=True
    )
    row = TokenDataset.from_dataset(shown, context_length=9)[0]
    assert_row(row, [1, 2, 3], [-100, -100, 3])


def as_rows(dataset):
    from ds_hydra.trainer.data import as_datasets

    return as_datasets(dataset, "train_dataset")


def test_texts_that_are_no_utf_8_are_refused_by_column(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "bro\xffken"}\n')
    rows = load_dataset("json", data_files=str(tmp_path / "data.jsonl"), split="train")
    with pytest.raises(HydraDataError, match="column 'text' holds bytes that are no UTF-8"):
        TokenDataset.from_dataset(
            rows, context_length=8, tokenize=lambda texts: {"input_ids": [[1]] * len(texts)}
        )
