"""Tokenizers: the built-in characters, chat templates, incremental text and stop strings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.errors import InputError
from hotloop.models.tokenizer import (
    Detokenizer,
    StopMatcher,
    Tokenizer,
    build_char_tokenizer,
    char_tokenizer,
    check_vocabulary,
    cut_at_stop,
    open_tokenizer,
)


def write_char(directory: Path, **config: object) -> Path:
    for name, content in build_char_tokenizer().items():
        (directory / name).write_bytes(content)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer whose tokens are single bytes, so that characters are split."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def test_the_character_tokenizer_has_the_ids_of_the_default_task() -> None:
    tokenizer = char_tokenizer()
    assert tokenizer.vocab_size == 32
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (0, (2,))
    assert tokenizer.encode("s52813=") == [1, 13, 8, 5, 11, 4, 6, 14]
    assert tokenizer.encode("09", add_special_tokens=False) == [3, 12]
    assert tokenizer.decode([1, 13, 3, 2]) == "s0"
    assert tokenizer.decode([1, 13, 3, 2], skip_special_tokens=False) == "<bos>s0<eos>"


def test_every_character_of_the_tasks_survives_a_round_trip() -> None:
    text = "0123456789s=+-*/(),:. ?\nacmx#"
    tokenizer = char_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(range(3, 32))
    assert tokenizer.decode(ids) == text


def test_an_unknown_character_is_an_error_and_never_dropped() -> None:
    with pytest.raises(InputError) as caught:
        char_tokenizer().encode("s1Q=")
    assert caught.value.code == "not_in_vocabulary"


def test_transformers_opens_the_character_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(write_char(tmp_path, model_type="qwen3"))
    assert theirs("s12=")["input_ids"] == char_tokenizer().encode("s12=")
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (2, 0, 1)
    assert theirs.decode([13, 4, 5, 2], skip_special_tokens=True) == "s12"


def test_stop_ids_come_from_tokenizer_config_and_generation_config(tmp_path: Path) -> None:
    write_char(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert open_tokenizer(tmp_path).stop_ids == (2, 9)


def test_the_chat_template_is_rendered_and_encoded_without_a_second_bos(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_char(tmp_path))
    messages = [{"role": "user", "content": "s21="}]
    assert tokenizer.render_chat(messages) == "<bos>s21="
    assert tokenizer.encode_chat(messages) == [1, 13, 5, 4, 14]


def test_a_template_file_wins_and_may_refuse(tmp_path: Path) -> None:
    write_char(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[0]['role']) }}")
    with pytest.raises(InputError, match="no user") as caught:
        open_tokenizer(tmp_path).render_chat([{"role": "user", "content": ""}])
    assert caught.value.code == "chat_template"


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    write_char(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError) as caught:
        open_tokenizer(tmp_path).render_chat([{"role": "user", "content": ""}])
    assert caught.value.code == "chat_template"


def test_no_template_and_no_tokenizer_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        char_tokenizer().render_chat([])
    assert caught.value.code == "no_chat_template"
    with pytest.raises(InputError) as caught:
        open_tokenizer(tmp_path)
    assert caught.value.code == "tokenizer_not_found"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        open_tokenizer(tmp_path)
    assert caught.value.code == "tokenizer_unreadable"


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    check_vocabulary(char_tokenizer(), 32, where="here")
    with pytest.raises(InputError, match="ids up to 31") as caught:
        check_vocabulary(char_tokenizer(), 31, where="here")
    assert caught.value.code == "tokenizer_larger_than_embedding"


def test_text_handed_out_never_changes_when_a_character_is_split() -> None:
    tokenizer = byte_tokenizer()
    text = "a\u00e9\u4e16 \U0001f600!"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    pieces = []
    detokenizer = Detokenizer(tokenizer)
    for token in ids:
        pieces.append(detokenizer.push([token]))
    assert pieces == ["a", "", "\u00e9", "", "", "\u4e16", " ", "", "", "", "\U0001f600", "!"]
    assert detokenizer.finish() == ""


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("\u4e16")[:2]) == ""
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_a_stop_string_is_found_across_tokens() -> None:
    matcher = StopMatcher(char_tokenizer(), ["=5x", "55"])
    ids = char_tokenizer().encode("1=55", add_special_tokens=False)
    assert [matcher.push(token) for token in ids] == [None, None, None, "55"]
    assert matcher.matched == "55"


def test_the_text_is_cut_before_the_earliest_stop_string() -> None:
    assert cut_at_stop("12=34\n5", ["\n", "=34", "=3"]) == "12"
    assert cut_at_stop("12", ["x", ""]) == "12"


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, hotloop.models.tokenizer as t; t.char_tokenizer(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
