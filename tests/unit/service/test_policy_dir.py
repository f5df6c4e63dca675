"""The tokenizer of what a replica serves: its errors go to clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.errors import InputError
from hotloop.models.tokenizer import build_char_tokenizer
from hotloop.service.policy_dir import open_policy_tokenizer


@pytest.mark.parametrize("is_override", [False, True])
def test_an_error_of_a_request_does_not_show_where_the_tokenizer_lies(is_override: bool, tmp_path: Path) -> None:
    for name, data in build_char_tokenizer().items():
        if "template" not in name:
            (tmp_path / name).write_bytes(data)
    config = tmp_path / "tokenizer_config.json"
    if config.exists():
        config.unlink()
    tokenizer = open_policy_tokenizer(Path("/nowhere") if is_override else tmp_path, str(tmp_path) * is_override)
    assert tokenizer is not None
    for code, ask in (
        ("no_chat_template", lambda: tokenizer.render_chat([{"role": "user", "content": "1"}])),
        ("not_in_vocabulary", lambda: tokenizer.encode("\u4e2d")),
    ):
        with pytest.raises(InputError) as caught:
            ask()
        assert (caught.value.code, caught.value.where) == (code, "the deployment's tokenizer")
        assert str(tmp_path) not in str(caught.value)
