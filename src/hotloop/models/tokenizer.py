"""Text in, ids out and back: tokenizer, chat template, stop ids, incremental text for stop strings.

Owns: `open_tokenizer` for any Hugging Face directory with a `tokenizer.json` (others are converted once by
transformers), the character tokenizer of the built-in policies, `Detokenizer` and `StopMatcher`.

Promises: no torch, no remote code; templates run in a sandbox. Text handed out by `Detokenizer` never changes later:
an unfinished UTF-8 character is held back.

Does not do: sampling or stopping (engines/); it only says which ids and strings end an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotloop.errors import InputError, MissingExtra

_REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a character."""

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = "0123456789s=+-*/(),:. ?\nacmx#"
"""Ids 3 and up of the character tokenizer, in order: what sorting, addition and countdown need."""
CHAR_VOCAB_SIZE = 32


class Tokenizer:
    """One tokenizer, opened. Thread-safe: nothing changes after construction."""

    def __init__(
        self,
        backend: Any,
        *,
        stop_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str = "",
        pad_id: int | None = None,
        where: str = "tokenizer",
    ) -> None:
        self._backend = backend
        self._special = dict(special_tokens or {})
        self._template = chat_template
        self._where = where
        self.stop_ids: tuple[int, ...] = tuple(stop_ids)
        """Ids that end an answer: eos of the tokenizer, config.json and generation_config.json."""
        self.pad_id: int = pad_id if pad_id is not None else (self.stop_ids[0] if self.stop_ids else 0)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return int(max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    @property
    def chat_template(self) -> str:
        """Source of the chat template; empty when there is none."""
        return self._template

    @property
    def has_chat_template(self) -> bool:
        """True when `render_chat` works."""
        return bool(self._template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids.

        Raises:
            InputError: code `not_in_vocabulary` when a character has no token and the tokenizer has no unknown token.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # the library raises bare Exception
            raise InputError(
                "not_in_vocabulary",
                f"the tokenizer cannot encode {text[:40]!r} ({error})",
                where=self._where,
                do="Use only characters that this policy knows, or another policy.",
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Give the text of one token by itself, special tokens included; used to label logprobs."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """Give the id of a token by its exact name, None when there is none."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render chat messages with the policy's own template; encode the result with `add_special_tokens=False`.

        Raises:
            InputError: code `no_chat_template` when there is none, `chat_template` when it refuses these messages.
        """
        if not self._template:
            raise InputError(
                "no_chat_template",
                "this policy's tokenizer has no chat template",
                where=self._where,
                do="Send a plain prompt, or add chat_template.jinja to the policy directory.",
            )
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self._template).render(
                messages=list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self._special,
                **kwargs,
            )
        except jinja2.TemplateError as error:
            raise InputError("chat_template", f"the chat template refused ({error})", where=self._where) from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Render and encode chat messages."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)


class Detokenizer:
    """Text of a growing answer, piece by piece.

    A token's text can depend on the one before it (leading spaces, split characters), so each piece is the difference
    of two decodes over a short window instead of the decode of one token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._window = 0
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain."""
        self._ids.extend(ids)
        before, after = self._decode_window()
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character read as the replacement character."""
        before, after = self._decode_window()
        self._window = self._read = len(self._ids)
        return after[len(before) :]

    def _decode_window(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._ids[self._window : self._read], skip_special_tokens=self._skip)
        after = self._tokenizer.decode(self._ids[self._window :], skip_special_tokens=self._skip)
        return before, after


class StopMatcher:
    """Finds the first stop string in a growing answer."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._text = Detokenizer(tokenizer)
        self._stop = tuple(text for text in stop if text)
        self._tail = ""
        self._keep = max((len(text) for text in self._stop), default=1) - 1
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, token_id: int) -> str | None:
        """Add one token; return the stop string that it completed, the earliest in the text if there are several."""
        piece = self._text.push([token_id])
        if not piece:
            return None
        self._tail += piece
        match = find_stop(self._tail, self._stop)
        if match is None and self._keep < len(self._tail):
            self._tail = self._tail[len(self._tail) - self._keep :] if self._keep else ""
        self.matched = None if match is None else match[1]
        return self.matched


def find_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Find the earliest stop string in a text: its index and which one, or None. The longer one wins a tie."""
    hits = [(text.find(one), -len(one), one) for one in stop if one and one in text]
    if not hits:
        return None
    index, _, which = min(hits)
    return index, which


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut a text before the first stop string in it."""
    match = find_stop(text, stop)
    return text if match is None else text[: match[0]]


def open_tokenizer(directory: Path | str, *, where: str = "") -> Tokenizer:
    """Open the tokenizer of a Hugging Face directory.

    Args:
        where: what its later errors call it, for those who should not see the path; the directory when empty.

    Raises:
        InputError: code `tokenizer_not_found` when there is none, `tokenizer_unreadable` when it cannot be read.
        MissingExtra: the package tokenizers is not installed.
    """
    directory = Path(directory)
    settings = _read_json(directory / "tokenizer_config.json")
    backend = _open_backend(directory)
    special: dict[str, str] = {}
    for source in (_read_json(directory / "special_tokens_map.json"), settings):
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
    stop: list[Any] = []
    if "eos_token" in special:
        stop.append(_id_or(backend, special["eos_token"]))
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(directory / name).get("eos_token_id")
        stop.extend(eos if isinstance(eos, list) else [eos])
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several named templates; "default" is the one for chat
        template = next((one["template"] for one in template if one.get("name") == "default"), "")
    template_file = directory / "chat_template.jinja"
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    pad_id = _id_or(backend, special["pad_token"]) if "pad_token" in special else None
    return Tokenizer(
        backend,
        stop_ids=list(dict.fromkeys(one for one in stop if isinstance(one, int) and one >= 0)),
        special_tokens=special,
        chat_template=template,
        pad_id=pad_id,
        where=where or str(directory),
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, *, where: str) -> None:
    """Refuse a tokenizer that can produce ids without an embedding.

    Raises:
        InputError: code `tokenizer_larger_than_embedding`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            "tokenizer_larger_than_embedding",
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1} and the embedding has {vocab_size} rows",
            where=where,
            do="Use the tokenizer that was saved with these weights, or resize the embedding.",
        )


def build_char_tokenizer() -> dict[str, bytes]:
    """Make the files of the built-in character tokenizer: pad 0, bos 1, eos 2, then `CHARACTERS`, 32 ids in all.

    `encode` puts bos in front; a character outside the table is an error, never dropped.
    """
    library = _tokenizers_library()
    vocab = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    vocab.update({character: 3 + index for index, character in enumerate(CHARACTERS)})
    vocab.update({f"<unused{index}>": index for index in range(len(vocab), CHAR_VOCAB_SIZE)})
    backend = library.Tokenizer(library.models.WordLevel(vocab, unk_token="<no such token>"))
    backend.pre_tokenizer = library.pre_tokenizers.Split(library.Regex("[\\s\\S]"), behavior="isolated")
    backend.decoder = library.decoders.Fuse()
    backend.post_processor = library.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    return {
        "tokenizer.json": backend.to_str(pretty=True).encode("utf-8"),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode("utf-8"),
    }


def char_tokenizer() -> Tokenizer:
    """Open the built-in character tokenizer without a directory."""
    backend = _tokenizers_library().Tokenizer.from_str(build_char_tokenizer()["tokenizer.json"].decode("utf-8"))
    return Tokenizer(backend, stop_ids=(EOS_ID,), pad_id=PAD_ID, where="built-in character tokenizer")


def _id_or(backend: Any, token: str) -> int:
    found = backend.token_to_id(token)
    return -1 if found is None else int(found)


def _tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtra("a tokenizer", "tokenizers", "torch") from error
    return tokenizers


def _open_backend(directory: Path) -> Any:
    library = _tokenizers_library()
    path = directory / "tokenizer.json"
    try:
        if path.is_file():
            return library.Tokenizer.from_file(str(path))
        if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
            raise InputError(
                "tokenizer_not_found",
                "there is no tokenizer.json",
                where=str(directory),
                do="Copy the tokenizer files of the base model into the directory.",
            )
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
    except InputError:
        raise
    except Exception as error:  # the library raises bare Exception for every unreadable file
        raise InputError("tokenizer_unreadable", f"cannot be read ({error})", where=str(directory)) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("tokenizer_unreadable", f"not valid JSON ({error})", where=str(path)) from error
    return found if isinstance(found, dict) else {}
