"""What one replica serves right now: engine, tokenizer, identity, version.

Owns: `Served` and opening an engine for it. Promises: `identity` and `policy_version` change only after an install.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from hotloop.engines.base import Engine, EngineSettings, open_engine
from hotloop.models.tokenizer import Tokenizer
from hotloop.service.engine_data import BlockOptions
from hotloop.service.namespaces import Namespaces
from hotloop.service.policy_dir import open_policy_tokenizer


@dataclass(slots=True)
class Served:
    """The weights in use."""

    engine: Engine | None = None
    tokenizer: Tokenizer | None = None
    identity: str = ""
    policy_version: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    """The policy's config.json."""
    namespaces: Namespaces = field(default_factory=Namespaces)

    @property
    def block_options(self) -> BlockOptions:
        """What describing completions needs to know of the policy."""
        if self.engine is None or self.engine.info.num_experts == 0:
            return BlockOptions()
        info = self.engine.info
        dense = set(self.config.get("mlp_only_layers") or ())
        step = int(self.config.get("decoder_sparse_step") or 1)
        moe = tuple(i for i in range(info.num_layers) if i not in dense and (i + 1) % step == 0)
        return BlockOptions(moe_layers=moe, num_experts=info.num_experts)


async def open_served(
    policy_dir: Path, settings: EngineSettings, tokenizer_dir: str, identity: str, policy_version: int
) -> Served:
    """Open engine and tokenizer of a directory; the slow part runs in a thread.

    Raises:
        HotloopError: the directory cannot be served by this engine.
    """
    engine = await asyncio.to_thread(open_engine, settings)
    try:
        tokenizer = await asyncio.to_thread(open_policy_tokenizer, policy_dir, tokenizer_dir)
        config_path = policy_dir / "config.json"
        config = orjson.loads(config_path.read_bytes()) if config_path.exists() else {}
    except BaseException:
        await engine.close()
        raise
    return Served(engine, tokenizer, identity, policy_version, config)
