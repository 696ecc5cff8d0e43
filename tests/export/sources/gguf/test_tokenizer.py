"""A tokenizer that went through a GGUF file gives every text the tokens that the original gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.sources.gguf.file import GgufFile
from via_sd.export.sources.gguf.tokenizer import write_tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>"]
#: Twenty scripts, marks that compose, emoji of several code points, code, numbers, spaces, and tokens in the text.
CORPUS = [
    "The quick brown fox isn't HERE; she'd've gone. It's 3.14159, 100000 or 1,234,567.",
    "Ελληνικά: γρήγορη αλεπού",
    "Русский: Съешь же ещё этих мягких французских булок",
    "עברית: דג סקרן שט בים",
    "العربية: نص حكيم له سر قاطع ١٢٣",
    "हिन्दी: ऋषियों को सताने वाले १२३",
    "বাংলা: আমার সোনার বাংলা",
    "ਪੰਜਾਬੀ: ਸਤ ਸ੍ਰੀ ਅਕਾਲ",
    "ગુજરાતી: કેમ છો",
    "தமிழ்: யாதும் ஊரே",
    "తెలుగు: నమస్కారం",
    "ಕನ್ನಡ: ನಮಸ್ಕಾರ",
    "മലയാളം: നമസ്കാരം",
    "සිංහල: ආයුබෝවන්",
    "ไทย: เป็นมนุษย์สุดประเสริฐ",
    "ລາວ: ສະບາຍດີ",
    "မြန်မာ: မင်္ဂလာပါ",
    "ქართული: გამარჯობა",
    "Հայերեն: Բարեւ Ձեզ",
    "አማርኛ: ሰላም ለዓለም",
    "日本語: いろはにほへと カタカナ 漢字",
    "한국어: 키스의 고유조건은",
    "中文: 我能吞下玻璃而不伤身体。",
    "café cafe\u0301 Å A\u030a ﬁ ½ Ⅷ ²",
    "🙂 👩‍👩‍👧 🏳️‍🌈 👍🏽 🇫🇷",
    "def f(x):\n    return x**2 + 0x1F  # comment\n\n\n\tif True:\r\n\t\tpass\n",
    "  leading   and trailing \n\n \t ",
    "<|im_start|>user\nhi<|im_end|>\n<think> a <think>b",
    "",
    " ",
    "\n",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


#: Name in a GGUF file -> how the tokenizers of models with that name split text, normalise it, and treat whole words.
ORIGINALS: dict[str, tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None, bool]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        None,
        False,
    ),
    "qwen2": (split(PRETOKENIZE_REGEX), normalizers.NFC(), False),
    "llama-bpe": (split(LLAMA3), None, True),
}


def original(name: str) -> Tokenizer:
    """A tokenizer as models with that pre-tokenizer have it, trained on the corpus and as many digits again."""
    pre_tokenizer, normalizer, whole_words = ORIGINALS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *(str(n) for n in range(1000, 3000, 7))], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def keys_of(tokenizer: Tokenizer, name: str | None, **changes: Any) -> dict[str, Any]:
    described = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = dict.fromkeys(SPECIAL, CONTROL) | {"<think>": USER_DEFINED}
    padding = ["[PAD1]", "[PAD2]"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    keys = {
        "model": "gpt2",
        "pre": name,
        "tokens": tokens + padding,
        "token_type": [kinds.get(token, NORMAL) for token in tokens] + [UNUSED] * len(padding),
        "merges": merges,
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def write(keys: dict[str, Any], directory: Path) -> Tokenizer:
    write_tokenizer(GgufFile(directory / "model.gguf", {"general.architecture": "llama", **keys}, {}), directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("name", ORIGINALS)
def test_every_text_has_the_tokens_of_the_original(name, tmp_path):
    wanted = original(name)
    found = write(keys_of(wanted, name, add_bos_token=False), tmp_path)
    assert found.get_vocab(with_added_tokens=True) == wanted.get_vocab(with_added_tokens=True)
    for text in [*CORPUS, "\n".join(CORPUS), "".join(CORPUS)]:
        ids = wanted.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids, skip_special_tokens=False) == wanted.decode(ids, skip_special_tokens=False)


def test_the_ways_to_split_are_told_apart_by_the_corpus(tmp_path):
    """Each other name gives some text other tokens: the test above could not miss a wrong one."""
    for name in ORIGINALS:
        keys = keys_of(original(name), name, add_bos_token=False)
        texts = {}
        for other in ORIGINALS:
            (tmp_path / f"{name}-{other}").mkdir()
            tokenizer = write({**keys, "tokenizer.ggml.pre": other}, tmp_path / f"{name}-{other}")
            texts[other] = [tuple(tokenizer.encode(text).ids) for text in CORPUS]
        assert all(texts[other] != texts[name] for other in ORIGINALS if other != name)


def test_tokens_are_put_around_a_text_where_the_file_says_so(tmp_path):
    keys = keys_of(original("gpt-2"), "gpt-2", add_bos_token=True, add_eos_token=True)
    bos, eos = keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]
    ids = write(keys, tmp_path).encode("hi").ids
    assert (ids[0], ids[-1]) == (bos, eos)
    assert not {bos, eos} & set(ids[1:-1])


def test_every_key_that_ends_a_text_counts(tmp_path):
    tokenizer = original("gpt-2")
    ids = {role: tokenizer.token_to_id(token) for role, token in zip(("eos", "eot", "eom"), SPECIAL, strict=False)}
    write(keys_of(tokenizer, "gpt-2", **{f"{role}_token_id": index for role, index in ids.items()}), tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == sorted(ids.values())


def test_named_templates_are_kept_by_name(tmp_path):
    keys = keys_of(original("gpt-2"), "gpt-2")
    write({**keys, "tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert written == [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]


@pytest.mark.parametrize(
    ("changes", "match", "kind"),
    [
        ({"pre": "mpt-of-2031"}, "splits text by pre-tokenizer 'mpt-of-2031'", UnsupportedModelError),
        ({"pre": "default"}, "splits text by pre-tokenizer 'default'", UnsupportedModelError),
        ({"pre": None}, "names no pre-tokenizer", UnsupportedModelError),
        ({"model": "rwkv"}, "tokenizer of kind 'rwkv'", UnsupportedModelError),
        ({"eos_token_id": 10**6}, "eos_token_id 1000000, wanted one of its", ExportError),
        ({"token_type": [1]}, "1 token types for", ExportError),
        ({"merges": ["a nonsense"]}, "a merge 'a nonsense' that makes no token", ExportError),
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens", ExportError),
    ],
)
def test_a_tokenizer_that_would_be_guessed_is_refused(changes, match, kind, tmp_path):
    with pytest.raises(kind, match=match):
        write(keys_of(original("gpt-2"), "gpt-2", **changes), tmp_path)
