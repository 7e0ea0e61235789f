"""The engines under measurement: what each does for one timed task."""

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Engine(Protocol):
    """One loaded model. All tasks are greedy and run to their full length; ids go in and ids come
    out, without text."""

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt's token ids to the first output token."""
        ...

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Seconds per output token of one request, from its first token to its last."""
        ...

    def request(self, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
        """``prefill`` and ``decode`` of one request, by these names."""
        ...

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds for all the prompts together, prefill included."""
        ...


class EyasEngine:
    """Eyas as a user runs it; without the prefix cache, so that repeats repeat the work."""

    def __init__(
        self,
        model: str,
        threads: int,
        speculative_config: dict[str, Any] | None = None,
        max_model_len: int = 2048,
        max_num_seqs: int = 8,
        kv_cache_memory: int | None = None,
    ) -> None:
        from eyas.llm import LLM

        self._llm = LLM(
            model,
            speculative_config=speculative_config,
            num_threads=threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=kv_cache_memory,
            enable_prefix_caching=False,
        )

    def prefill(self, prompt: Sequence[int]) -> float:
        return self.batch([prompt], 1)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        return self.request(prompt, num_tokens)["decode"]

    def request(self, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        stream = self._llm.stream(list(prompt), self._params(num_tokens))
        times = [time.perf_counter() for _ in stream]
        return {
            "prefill": times[0] - started,
            "decode": (times[-1] - times[0]) / (num_tokens - 1),
        }

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
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

    def profile(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Of one decode step within ``generate``, text included, in seconds: the whole, the calls
        of the executor (forward and sampling), and each kind of kernel in the native programs.

        A step is the difference between a run of ``num_tokens`` and one of one token, divided.
        """
        from eyas.bench.profiling import Stopwatch, native_programs
        from eyas.sampling.params import SamplingParams

        executor: Any = self._llm.engine.executor
        programs = native_programs(executor.runner.target)
        for program in programs:
            program.set_profiling(True)
        watch = Stopwatch(executor, "execute")

        def run(count: int) -> dict[str, float]:
            before = {"executor": watch.seconds} | _kernel_seconds(programs)
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            request: list[Any] = [{"prompt_token_ids": list(prompt)}]
            started = time.perf_counter()
            self._llm.generate(request, params, use_tqdm=False)
            whole = time.perf_counter() - started
            after = {"executor": watch.seconds} | _kernel_seconds(programs)
            return {"step": whole} | {k: after[k] - before.get(k, 0.0) for k in after}

        with watch:
            run(2)  # compiles the programs, whose first run is unlike the others
            short, long = run(1), run(num_tokens)
        step = {k: (long[k] - short.get(k, 0.0)) / (num_tokens - 1) for k in long}
        return {"step": step.pop("step"), "executor": step.pop("executor"), "kernels": step}

    def sizes(self) -> dict[str, int]:
        """``kv_bytes_per_token``: what one more token in a context adds to read."""
        executor: Any = self._llm.engine.executor
        size = executor.kv_element_size
        return {"kv_bytes_per_token": sum(g.bytes_per_token(size) for g in executor.groups)}

    def _params(self, num_tokens: int) -> Any:
        from eyas.sampling.params import SamplingParams

        return SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )


def _kernel_seconds(programs: Sequence[Any]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for program in programs:
        for kind, _, spent in program.profile():
            seconds[kind] = seconds.get(kind, 0.0) + spent
    return seconds
