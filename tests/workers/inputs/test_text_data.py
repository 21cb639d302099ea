"""Text becomes ids of one public length, and every process gets the same ones or sees that it does not."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raycloak.attestation.core.data_marks import Likeness, likeness
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.attestation.sealed.sealed_data import slice_key
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.references import descriptor
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.in_memory import export_in_memory
from raycloak.workers.inputs.places import NOWHERE
from raycloak.workers.inputs.sealed import SealedDataset, seal_dataset
from raycloak.workers.inputs.text_data import Tokenizer
from tests.tiny_text import WORDS, write_reviews, write_tokenizer
from tests.workers.inputs.content import content_digest


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_tokenizer(folder / "words")
    write_reviews(folder / "train.tsv", 20)
    (folder / "plot.txt").write_text("the film was very fine\n" * 5)
    return folder


def described(**fields):
    given = {"kind": "text", "path": "train.tsv", "tokenizer": "words", "max_length": 6}
    return DatasetDescriptor.model_validate({**given, **fields})


def opened(base, **fields):
    return described(**fields).open_slices(base)


def test_a_table_of_text_is_cut_and_padded_to_one_length(base):
    (base / "two.tsv").write_text("good film\t1\nthe plot is very very dull\t0\n")
    data = opened(base, path="two.tsv")
    features, labels = data.examples.batch(np.arange(2))
    assert features.tolist() == [[2, 4, 6, 3, -1, -1], [2, 9, 7, 14, 10, 3]]
    assert (labels.tolist(), features.dtype, labels.dtype) == ([1, 0], np.int64, np.int64)
    assert data.vocabulary == 16
    form = dataset_form(data.examples)
    assert (form.feature_shape, form.label_shape) == ((6,), ())


def test_a_parquet_table_gives_the_same(base):
    rows = [row.rsplit("\t", 1) for row in (base / "train.tsv").read_text().splitlines()]
    table = {"sentence": [text for text, _ in rows], "label": [int(label) for _, label in rows]}
    pq.write_table(pa.table(table), base / "train.parquet")
    one = opened(base).examples.batch(np.arange(20))
    other = opened(base, path="train.parquet", features=("sentence",), labels="label").examples.batch(np.arange(20))
    assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    with pytest.raises(DatasetError) as caught:
        opened(base, path="train.parquet", features=("label",), labels="label")
    assert caught.value.code == "dataset_array"


def test_a_text_is_cut_to_blocks_that_are_their_own_labels(base):
    data = opened(base, kind="text_blocks", path="plot.txt", max_length=4)
    features, labels = data.examples.batch(np.arange(len(data.examples)))
    words = [4 + WORDS.index(word) for word in ["the", "film", "was", "very", "fine"]] * 5
    assert features[features >= 0].tolist() == words
    assert features[-1].tolist() == [words[-1], -1, -1, -1]
    assert labels[-1].tolist() == [words[-1], -100, -100, -100]
    assert np.array_equal(features[:-1], labels[:-1])


@pytest.mark.parametrize("text", ["good film 1\n", "good film\tfine\n", "\t1\n", "good\t1\n\n", "good\t1.5\n"])
def test_a_line_without_text_and_class_is_refused_without_the_line(text, base):
    (base / "bad.tsv").write_text(text)
    with pytest.raises(DatasetError) as caught:
        opened(base, path="bad.tsv")
    assert caught.value.code == "dataset_array"
    assert "good" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"path": "none.tsv"}, "dataset_unreadable"), ({"kind": "text_blocks", "path": "empty.txt"}, "dataset_empty")],
)
def test_a_file_without_examples_is_refused(fields, code, base):
    (base / "empty.txt").write_text("")
    with pytest.raises(DatasetError) as caught:
        opened(base, **fields)
    assert caught.value.code == code


def test_another_tokenizer_is_another_tokenizer_wherever_it_lies(base):
    """Guarantee of `Tokenizer.content`: the manifest has it."""
    write_tokenizer(base / "moved")
    write_tokenizer(base / "other", [*WORDS[1:], WORDS[0]])
    first = Tokenizer.load("words", base)
    assert Tokenizer.load("moved", base).content == first.content
    assert Tokenizer.load("other", base).content != first.content
    first.rows(["good film"], 3)
    assert Tokenizer.load("words", base).content == first.content
    assert described(tokenizer="moved").identity_digest() == described().identity_digest()
    assert described(max_length=7).identity_digest() != described().identity_digest()


def test_a_folder_without_a_tokenizer_is_named(base):
    (base / "nothing").mkdir(exist_ok=True)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load("nothing", base)
    assert caught.value.code == "tokenizer"


def test_what_is_not_cached_says_how_to_fetch_it(base, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load("nobody/has-this-tokenizer", base)
    assert caught.value.code == "not_cached"
    assert "hf download nobody/has-this-tokenizer" in caught.value.remedy


def test_without_the_libraries_the_command_to_install_them_is_named(base, monkeypatch):
    monkeypatch.setattr("raycloak.workers.inputs.hub_files.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load("words", base)
    assert caught.value.code == "hf_missing"
    assert "pip install 'raycloak[hf]'" in caught.value.remedy


def test_sealed_text_opens_as_the_ids_that_were_sealed(base, tmp_path):
    """Padding too: a run on sealed text needs no tokenizer."""
    plain = opened(base).examples
    demand = SealedDemand(ledger_key=b"l" * 32, account="readers", least_noise_multiplier=1.0)
    owner = Secret(b"d" * 32)
    header = seal_dataset(plain, 2, b"p" * 32, owner, tmp_path / "sealed", demand=demand)
    sealed = SealedDataset(tmp_path / "sealed")
    sealed.unlock({v: slice_key(owner, header, v) for v in range(2)})
    ids = np.arange(len(plain))
    assert (plain.batch(ids)[0] == -1).any()
    assert all(np.array_equal(*pair) for pair in zip(plain.batch(ids), sealed.batch(ids), strict=True))


class Encoded:
    """Examples as a tokenizer of Hugging Face gives them."""

    vocabulary = 16

    def __init__(self, **more):
        self._more = more

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index >= 3:
            raise IndexError
        ids = torch.tensor([2, 4 + index, 3, 0])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": index % 2, **self._more}


def test_a_dataset_of_mappings_is_packed_with_its_mask(tmp_path):
    data = export_in_memory(Encoded(token_type_ids=[0, 0, 0, 0]), tmp_path / "examples.npz").open_slices(tmp_path)
    features, labels = data.examples.batch(np.arange(3))
    assert features.tolist() == [[2, 4, 3, -1], [2, 5, 3, -1], [2, 6, 3, -1]]
    assert (labels.tolist(), data.vocabulary) == ([0, 1, 0], 16)


@pytest.mark.parametrize("more", [{"token_type_ids": [0, 0, 1, 1]}, {"labels": None}])
def test_a_mapping_with_more_or_less_is_refused(more, tmp_path):
    with pytest.raises(DatasetError) as caught:
        export_in_memory(Encoded(**more), tmp_path / "examples.npz")
    assert caught.value.code == "dataset_array"


RUN = {
    "expected_batch_size": 8,
    "model": {"hf": "words", "task": "sequence_classification"},
    "dp_config": {"target_epsilon": 8},
}


def test_text_takes_the_models_tokenizer_and_the_tasks_loss():
    text = {"kind": "text", "path": "train.tsv", "max_length": 6}
    split = {"dataset": {**text, "path": "dev.tsv", "public": True}}
    config = parse_config({**RUN, "dataset": text, "evaluation": split})
    assert config.dataset.tokenizer == "words"
    assert config.evaluation.dataset.tokenizer == "words"
    own = {"dataset": {**text, "tokenizer": "own"}}
    assert parse_config({**RUN, **own}).dataset.tokenizer == "own"
    with pytest.raises(ConfigError, match="one vocabulary"):
        parse_config({**RUN, **own, "evaluation": split})
    assert config.loss == "cross_entropy"
    causal = {**RUN["model"], "task": "causal_lm"}
    assert parse_config({**RUN, "model": causal, "dataset": text}).loss == "next_token_cross_entropy"
    assert parse_config({**RUN, "model": causal, "dataset": text, "loss": "own:loss"}).loss == "own:loss"
    assert parse_config(config.model_dump(mode="json")) == config
    assert descriptor(config.dataset).max_length == 6


@pytest.mark.parametrize(
    "dataset",
    [
        {"kind": "text", "path": "a.tsv"},
        {"kind": "npz", "path": "a.npz", "max_length": 6},
        {"kind": "text", "path": "a.tsv", "max_length": 6, "vocabulary": 16},
        {"kind": "text", "path": "a.tsv", "max_length": 6, "scale": 2.0},
        {"kind": "text", "max_length": 6},
        {"kind": "text", "path": "a.parquet", "max_length": 6, "features": ["question", "sentence"]},
    ],
)
def test_fields_of_another_kind_are_refused(dataset):
    with pytest.raises(ConfigError, match="dataset"):
        parse_config({**RUN, "dataset": dataset})


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="tokenizer"):
        parse_config({**RUN, "model": "own:model", "dataset": {"kind": "text", "path": "a.tsv", "max_length": 6}})


@pytest.mark.parametrize("kind", ["text", "text_blocks"])
def test_text_is_known_by_its_file_whatever_it_is_cut_to(base, kind):
    (base / "text.key").touch(mode=0o600)
    (base / "text.key").write_text("0f" * 32)
    keyed = [described(kind=kind, max_length=length, fingerprint_key="text.key") for length in (4, 6)]
    opened = [each.open_slices(base) for each in keyed]
    assert {each.file_digest for each in opened} == {content_digest((base / "train.tsv").read_bytes())}
    # Nothing else says that they are one, once the file has moved.
    found = [data_marks(each, replace(data, places=NOWHERE), base) for each, data in zip(keyed, opened, strict=True)]
    assert likeness(*found) is Likeness.PLACE
