"""Which module builds which kind of engine; imported only when one is opened.

Owns: the table of engine kinds. Does not do: anything an engine does.
"""

from __future__ import annotations

from hotloop.engines.base import Engine, EngineSettings
from hotloop.errors import InputError, MissingExtra


def build(settings: EngineSettings) -> Engine:
    """Build the engine of `settings.kind`.

    Raises:
        MissingExtra: the implementation needs a package that is not installed.
        InputError: the policy directory or address is not usable.
    """
    if settings.kind == "fake":
        from hotloop.engines.fake import FakeEngine

        return FakeEngine.open(settings)
    if settings.kind == "torch":
        try:
            import torch  # noqa: F401  # tells a missing package from an error inside ours
        except ImportError as error:
            raise MissingExtra("the embedded engine", "torch", "torch") from error
        from hotloop.engines.torch.engine import build_engine

        return build_engine(settings)
    if settings.kind == "sglang":
        from hotloop.engines.sglang import SglangEngine

        return SglangEngine(settings)
    if settings.kind == "vllm":
        from hotloop.engines.vllm import VllmEngine

        return VllmEngine(settings)
    raise InputError(
        "engine_kind", f"there is no engine {settings.kind!r}", where="kind", do="Use torch, fake, sglang or vllm."
    )
