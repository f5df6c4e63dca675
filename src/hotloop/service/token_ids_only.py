"""The tokenizer of a snapshot that has none: token ids work, text is refused with what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotloop.errors import ServiceError
from hotloop.models.tokenizer import Tokenizer


class TokenIdsOnly(Tokenizer):
    """Encodes nothing; decodes to empty text."""

    def __init__(self) -> None:
        super().__init__(backend=None)

    @property
    def vocab_size(self) -> int:
        return 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Refuse. Raises: ServiceError `no_tokenizer`."""
        raise missing_tokenizer("prompt")

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Refuse. Raises: ServiceError `no_tokenizer`."""
        raise missing_tokenizer("prompt")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Give no text."""
        return ""

    def token_text(self, token_id: int) -> str:
        """Name a token by its id."""
        return f"token_id:{token_id}"


def missing_tokenizer(param: str) -> ServiceError:
    """Say that a field needs a tokenizer."""
    return ServiceError(
        "no_tokenizer",
        "the served snapshot holds no tokenizer",
        do="Send token ids as prompt, set tokenizer: in the deployment's file, or publish the tokenizer files.",
        details={"param": param},
    )
