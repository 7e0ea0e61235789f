"""OpenVINO GenAI on a GGUF file, or on a directory in OpenVINO's own format."""

import sys
import time
from collections.abc import Sequence
from typing import Any

# This file bears the package's name, and a script's folder is searched first: make it the last.
sys.path.append(sys.path.pop(0))
import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import require, serve, versions


class OpenVINO:
    """``attention`` is "PA", the continuous-batching pipeline, here without its prefix cache, or
    "SDPA", the pipeline for one batch of prompts; the three arguments after it are for "PA" alone.
    ``precision`` (f32, bf16, f16), ``cache_type`` (u8, f16, bf16, f32) and ``group_size`` (of
    activations that are quantised; 0: none are) are hints, left to OpenVINO when None."""

    def __init__(
        self,
        model: str,
        threads: int,
        attention: str = "PA",
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        cache_gib: int = 2,
        precision: str | None = None,
        cache_type: str | None = None,
        group_size: int | None = None,
    ) -> None:
        if attention not in ("PA", "SDPA"):
            raise ValueError(f"attention {attention!r} is neither PA nor SDPA")
        hints = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": cache_type,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_size,
        }
        self._properties: dict[str, Any] = {
            "ATTENTION_BACKEND": attention,
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            **{name: value for name, value in hints.items() if value is not None},
        }
        options = dict(self._properties)
        if attention == "PA":
            scheduler = genai.SchedulerConfig()
            scheduler.max_num_seqs = max_num_seqs
            scheduler.max_num_batched_tokens = max_num_batched_tokens
            scheduler.cache_size = cache_gib
            scheduler.enable_prefix_caching = False
            options["scheduler_config"] = scheduler
        try:
            self._pipeline = genai.LLMPipeline(require(model), "CPU", **options)
        except RuntimeError as error:
            raise ValueError(f"OpenVINO can't load {model}: {error}") from error

    def facts(self) -> dict[str, Any]:
        return {
            "versions": versions("openvino-genai", "openvino"),
            "settings": {name: str(value) for name, value in self._properties.items()},
        }

    def prefill(self, prompt: Sequence[int]) -> float:
        return self.batch([prompt], 1)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        return self.request(prompt, num_tokens)["decode"]

    def request(self, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        result = self._run([prompt], num_tokens)
        whole = time.perf_counter() - started
        metrics = result.perf_metrics
        times = metrics.raw_metrics.m_new_token_times
        assert len(times) == num_tokens, len(times)
        # In milliseconds, though documented as microseconds; so hold them against the clock.
        first, seconds = metrics.get_ttft().mean / 1e3, float(times[-1] - times[0]) / 1e3
        if not 0.9 * whole < first + seconds < 1.01 * whole:
            raise RuntimeError(f"OpenVINO reports {first} s + {seconds} s, but it took {whole} s")
        return {"prefill": first, "decode": seconds / (num_tokens - 1)}

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        started = time.perf_counter()
        self._run(prompts, num_tokens)
        return time.perf_counter() - started

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return [int(token) for token in self._run([prompt], num_tokens).tokens[0]]

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Any:
        """Prompts of different lengths are padded on the left, and the padding masked."""
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        longest = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        result = self._pipeline.generate(
            genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask)), config
        )
        assert all(len(tokens) == num_tokens for tokens in result.tokens)
        return result


if __name__ == "__main__":
    serve(OpenVINO)
