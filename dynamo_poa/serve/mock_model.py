"""Decides what the mock engine's model looks like: a tokenizer and the dimensions of a real one, no weights.

Owns: the vocabulary, the files of the model directory, and that they are written whole or not at all.
Does not own: where the directory lies (resolve.py) or how the mock engine spends its time (Dynamo).
Invariant: byte-identical on every run; every id from FIRST_CHARACTER_ID on decodes to visible text, and every
           word of `vocabulary_words()` is exactly one token, wherever it stands among words and spaces.
Source: measured: Dynamo 1.4.2's mock engine emits ids from about 1000 upward, and its frontend drops a
        chunk whose text is empty; dimensions are Llama-3.1-70B's config.json.
"""

import json
import os
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY_SIZE = 32_000
FIRST_CHARACTER_ID = 260  # after <unk>, <s>, </s>, the bare space and 256 bytes
FIRST_WORD_ID = FIRST_CHARACTER_ID + 94  # after the printable ASCII characters

_ONSETS = "bdfghjklmnprstvz"
_VOWELS = "aeiou"
_SPACE = "▁"  # how the Metaspace pre-tokenizer writes a space

# Equal for all words, so that one token always beats two; characters cost more: words win over spelling.
_WORD_SCORE = -10.0
_CHARACTER_SCORE = -20.0
_BYTE_SCORE = -40.0

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "initializer_range": 0.02,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "chat_template": _CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "model_max_length": 131072,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
}
_GENERATION_CONFIG: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}


@cache
def vocabulary_words() -> tuple[str, ...]:
    """Return the pseudo-words of the vocabulary, in order of their ids; each is one token."""
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    count = len(syllables)
    words = []
    for index in range(VOCABULARY_SIZE - FIRST_WORD_ID):
        # The factors are coprime to the count of words of that length: each comes once, in mixed order.
        if index % 5 == 0:
            first, second = divmod(index // 5 * 4001 % count**2, count)
            words.append(syllables[first] + syllables[second])
        else:
            first, rest = divmod(index * 104_729 % count**3, count**2)
            words.append(syllables[first] + syllables[rest // count] + syllables[rest % count])
    return tuple(words)


def random_words(count: int, seed: int) -> list[str]:
    """Return `count` words, the same for the same seed; joined with spaces they are `count` tokens."""
    return random.Random(seed).choices(vocabulary_words(), k=count)


def ensure_mock_model(directory: Path) -> Path:
    """Return `directory` with the mock model in it, writing it only where it is not there yet.

    Safe against two processes at once: both write the same bytes, the first to finish names the directory.
    """
    if (directory / "tokenizer.json").exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        for name, content in _files().items():
            (draft / name).write_text(content, encoding="utf-8")
        draft.chmod(0o755)
        if directory.exists() and not any(directory.iterdir()):
            directory.rmdir()
        try:
            os.rename(draft, directory)
        except OSError:
            if not (directory / "tokenizer.json").exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _files() -> dict[str, str]:
    return {
        "config.json": _json(_CONFIG),
        "generation_config.json": _json(_GENERATION_CONFIG),
        "tokenizer.json": _tokenizer().to_str(pretty=False),
        "tokenizer_config.json": _json(_TOKENIZER_CONFIG),
    }


def _tokenizer() -> Tokenizer:
    pieces: list[tuple[str, float]] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces.append((_SPACE, _CHARACTER_SCORE))
    pieces += [(f"<0x{byte:02X}>", _BYTE_SCORE) for byte in range(256)]
    pieces += [(chr(code), _CHARACTER_SCORE) for code in range(0x21, 0x7F)]
    pieces += [(_SPACE + word, _WORD_SCORE) for word in vocabulary_words()]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="always", split=True
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
