"""A reload for vLLM's CPU backend that reaches a tied output head; it runs inside the server, not here.

Owns: `HeadReload`, which a server mixes into its worker with `--worker-extension-cls`. The adapter calls it when
`engine.options.reload_method` is `reload_with_head`.
Why: on CPUs vLLM multiplies by copies of the matrices, packed once they are loaded. A reload packs anew what the
checkpoint names. A head that shares the embedding's weight has no name of its own there, so its copy stays as it was.
Promises: after the call every matrix that is still whole beside its packed copy has been packed again.
Does not do: anything on a GPU, where the head reads the embedding's memory; importing vLLM or torch.
Source: vLLM 0.32.0, `model_executor/layers/utils.py` and `model_executor/model_loader/reload/layerwise.py`, run.
"""

from __future__ import annotations

from typing import Any

HEAD_RELOAD_METHOD = "reload_with_head"


class HeadReload:
    """What the server's worker gets beside its own methods."""

    model_runner: Any
    reload_weights: Any

    def reload_with_head(self, weights_path: str) -> None:
        """Read a checkpoint, then pack again what shares a weight with another layer."""
        self.reload_weights(weights_path=weights_path)
        for layer in self.model_runner.get_model().modules():
            # Linear layers give their matrix up once it is packed; embeddings and heads keep it.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
