"""The engines under measurement: what each does for one timed task."""

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Engine(Protocol):
    """One loaded model. All tasks are greedy and run to their full length."""

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt's token ids to the first output token."""
        ...

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Seconds per output token of one request, from its first token to its last."""
        ...

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds for all the prompts together, prefill included."""
        ...


class EyasEngine:
    """Eyas as a user runs it; without the prefix cache, so that repeats repeat the work."""

    def __init__(
        self, model: str, threads: int, speculative_config: dict[str, Any] | None = None
    ) -> None:
        from eyas.llm import LLM

        self._llm = LLM(
            model,
            speculative_config=speculative_config,
            num_threads=threads,
            max_model_len=2048,
            max_num_seqs=8,
            enable_prefix_caching=False,
        )

    def prefill(self, prompt: Sequence[int]) -> float:
        started = time.perf_counter()
        self._llm.generate([self._request(prompt)], self._params(1), use_tqdm=False)
        return time.perf_counter() - started

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        stream = self._llm.stream(list(prompt), self._params(num_tokens))
        times = [time.perf_counter() for _ in stream]
        return (times[-1] - times[0]) / (num_tokens - 1)

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        requests = [self._request(prompt) for prompt in prompts]
        started = time.perf_counter()
        self._llm.generate(requests, self._params(num_tokens), use_tqdm=False)
        return time.perf_counter() - started

    def answer(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        """One chat prompt to its natural end: its tokens, its seconds, its drafts' counts."""
        from eyas.sampling.params import SamplingParams

        tokenizer = self._llm.get_tokenizer()
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        ids = tokenizer.encode(text, add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        timed = [(time.perf_counter(), output) for output in self._llm.stream(ids, params)]
        last = timed[-1][1]
        return {
            "tokens": last.outputs[0].token_ids,
            "seconds": timed[-1][0] - timed[0][0],
            "drafts": last.metrics.num_drafts,
            "accepted": last.metrics.num_accepted_tokens,
        }

    def _params(self, num_tokens: int) -> Any:
        from eyas.sampling.params import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def _request(self, prompt: Sequence[int]) -> Any:
        return {"prompt_token_ids": list(prompt)}
