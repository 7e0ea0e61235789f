"""The peer: transformers on the same weights, in float32, in its fastest plain loop.

``generate`` would add its own bookkeeping per token, so the loop is written out: a forward with
a KV cache and an arg-max, which is what plain greedy decoding is.
"""

import inspect
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from eyas.loading.checkpoint import open_checkpoint


class TransformersEngine:
    """A GGUF file is dequantised to float32 by transformers; a directory is read as float32."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        source = open_checkpoint(model).source
        path = source if isinstance(source, Path) else Path(source.path)
        options: dict[str, Any] = {"dtype": torch.float32}
        if path.is_file():
            options["gguf_file"] = path.name
            path = path.parent
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(path), **options)
        # Renamed in transformers 5.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def prefill(self, prompt: Sequence[int]) -> float:
        return self.batch([prompt], 1)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        return self.request(prompt, num_tokens)["decode"]

    def request(self, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
        times: list[float] = []
        started = time.perf_counter()
        self._run(torch.tensor([list(prompt)]), num_tokens, times)
        decode = (times[-1] - times[0]) / (num_tokens - 1)
        return {"prefill": times[0] - started, "decode": decode}

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        started = time.perf_counter()
        self._run(torch.tensor([list(prompt) for prompt in prompts]), num_tokens, [])
        return time.perf_counter() - started

    def facts(self) -> dict[str, Any]:
        """Versions and settings, as the peers outside this environment give them."""
        packages = ("transformers", "torch")
        return {
            "versions": {name: version(name) for name in packages},
            "settings": {"dtype": "float32"},
        }

    @torch.inference_mode()
    def negative_log_likelihood(self, tokens: Sequence[int]) -> float:
        """Of all tokens but the first, each after those before it: the sum, in nats."""
        ids_1T = torch.tensor([list(tokens)])
        logits_TV = self._model(ids_1T).logits[0, :-1]
        targets_T = ids_1T[0, 1:]
        total = 0.0
        for start in range(0, len(targets_T), 64):  # in parts: they are large as doubles
            part = slice(start, start + 64)
            mean = torch.nn.functional.cross_entropy(logits_TV[part].double(), targets_T[part])
            total += float(mean) * len(targets_T[part])
        return total

    @torch.inference_mode()
    def _run(self, ids_BT: torch.Tensor, num_tokens: int, times: list[float]) -> None:
        """Greedy decoding of B prompts of equal length; notes the time of each token."""
        cache = {self._cache_name: DynamicCache(config=self._model.config)}
        for _ in range(num_tokens):
            output = self._model(ids_BT, use_cache=True, logits_to_keep=1, **cache)
            ids_BT = output.logits[:, -1].argmax(-1, keepdim=True)
            ids_BT.tolist()  # an engine must know each token; ends lazy work
            times.append(time.perf_counter())
