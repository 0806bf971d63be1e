"""The mock model's promises, checked through the tokenizers library."""

import hashlib
import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dynamo_poa.serve.mock_model import (
    FIRST_CHARACTER_ID,
    FIRST_WORD_ID,
    VOCABULARY_SIZE,
    ensure_mock_model,
    random_words,
    vocabulary_words,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_mock_model(tmp_path_factory.mktemp("models") / "mock")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_two_runs_write_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """Deterministic: Dynamo compares model cards by checksum."""
    assert digests(ensure_mock_model(tmp_path / "again")) == digests(model)
    assert sorted(digests(model)) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_every_emitted_id_decodes_to_visible_text(tokenizer: Tokenizer) -> None:
    """An empty decoding makes the frontend drop the chunk (measured, Dynamo 1.4.2)."""
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE == 32_000
    texts = tokenizer.decode_batch([[token] for token in range(FIRST_CHARACTER_ID, VOCABULARY_SIZE)])
    assert [text for text in texts if not text.strip() or not text.isprintable()] == []
    assert len(set(texts)) == len(texts) == 31_740


def test_each_word_is_exactly_one_token(tokenizer: Tokenizer) -> None:
    """Load generators build prompts of an exact token count from words."""
    words = vocabulary_words()
    assert len(words) == 31_646
    encodings = tokenizer.encode_batch(list(words))
    assert [encoding.ids for encoding in encodings] == [[FIRST_WORD_ID + i] for i in range(len(words))]


def test_words_joined_with_spaces_are_as_many_tokens(tokenizer: Tokenizer) -> None:
    """1000 words, 1000 tokens, and the same text back; the seed decides which."""
    words = random_words(1000, seed=7)
    encoding = tokenizer.encode(" ".join(words))
    assert len(encoding.ids) == 1000
    assert tokenizer.decode(encoding.ids) == " ".join(words)
    assert random_words(1000, seed=7) == words
    assert random_words(1000, seed=8) != words


@pytest.mark.parametrize(
    "text", ["Hello, world!", "two\nlines\tand tabs", "Grüße, 你好 🙂", "<not-a-token> {}[]()\\", "\x00\x7f"]
)
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """User text is not made of our words: bytes stand in for what is missing."""
    encoding = tokenizer.encode(text)
    assert 0 not in encoding.ids
    assert tokenizer.decode(encoding.ids) == text


def test_streamed_tokens_arrive_with_their_spaces(tokenizer: Tokenizer) -> None:
    """The frontend decodes token by token against a prefix; the pieces must join to words with spaces."""
    first, second = vocabulary_words()[1000:1002]
    ids = [FIRST_WORD_ID + 1000, FIRST_WORD_ID + 1001]
    assert tokenizer.decode(ids[:1]) == first
    assert tokenizer.decode(ids) == f"{first} {second}"


def test_the_dimensions_are_those_of_llama_3_1_70b(model: Path) -> None:
    """Contract of the issue: the mock engine derives KV bytes per token from config.json."""
    config = json.loads((model / "config.json").read_text())
    expected = {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    }
    assert {key: config[key] for key in expected} == expected


def test_a_complete_directory_is_left_alone(tmp_path: Path) -> None:
    """Generated once: a second call neither rewrites nor replaces a file."""
    directory = tmp_path / "mock"
    ensure_mock_model(directory)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}
    ensure_mock_model(directory)
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}
    assert after == before


def test_concurrent_writers_leave_one_directory_and_no_draft(model: Path, tmp_path: Path) -> None:
    """Several processes may start at once; the directory appears whole, drafts disappear."""
    directory = tmp_path / "mock"
    writers = [threading.Thread(target=ensure_mock_model, args=(directory,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["mock"]
    assert digests(directory) == digests(model)
