"""LLM: offline generation, with vLLM's names."""

import itertools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from eyas.config import EngineConfig
from eyas.drafters.registry import SpeculativeOptions, parse_speculative_config
from eyas.engine.collector import OutputKind
from eyas.engine.engine import Engine, EngineOptions
from eyas.engine.inputs import Prompt
from eyas.engine.metrics import Metric
from eyas.engine.output import RequestOutput
from eyas.engine.scheduler import SchedulerOptions
from eyas.engine.spec_report import SpecDecodeStats
from eyas.executor.inproc import InprocExecutor, load_executor
from eyas.interrupts import deferred_interrupts
from eyas.loading.checkpoint import load_tokenizer, open_checkpoint
from eyas.sampling.params import SamplingParams
from eyas.tensors import StoredTensor, Weights
from eyas.tokenizer import Tokenizer
from eyas.vllm_arguments import ONLY_IN_VLLM

_DEFAULT_STEP_TOKENS = 512


class LLM:
    """An engine in this process. Use it as a context manager, or call ``shutdown`` when done.

    Arguments are EngineConfig's fields; ``speculative_config`` is a dict with "method" ("ngram" or
    "draft_model"), "num_speculative_tokens", optionally "acceptance" ("exact" or "rejection"), and
    the method's own keys ("prompt_lookup_max", "prompt_lookup_min"; "model"). ValueError, in one
    line, for anything unknown, impossible or contradictory.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        use_tqdm_on_load: bool = True,
        **options: Any,
    ) -> None:
        _refuse_unknown(options)
        for name in ("dtype", "kv_cache_dtype"):
            if name in options:  # torch.float16 is as good as "float16"
                options[name] = str(options[name]).removeprefix("torch.")
        config = EngineConfig(
            model=str(model), speculative=_read_speculative(speculative_config), **options
        )
        checkpoint = open_checkpoint(config.model, revision=config.revision)
        self._tokenizer = load_tokenizer(
            checkpoint if config.tokenizer is None else config.tokenizer
        )
        with _LoadingBar(config.model, disable=not use_tqdm_on_load) as bar:
            executor = load_executor(config, checkpoint, bar.watch)
        self.engine = Engine(
            executor, self._tokenizer, _engine_options(config, executor, self._tokenizer)
        )
        self._request_numbers = itertools.count()
        self._is_shut_down = False
        self._lock = threading.RLock()  # several threads may share the engine, step by step
        # The latest output, not yet read, of each request that somebody waits for.
        self._unread: dict[str, RequestOutput | None] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: text, token ids, or {"prompt_token_ids": …} / {"prompt": …}.

        Returns one output per prompt, in order; a request that fails alone has the finish reason
        "error". ``truncate_prompt_tokens`` keeps that many of a prompt's last tokens (-1: as many
        as fit); without it a prompt that is too long is refused. ValueError, before anything runs,
        if a prompt or a parameter is impossible.
        """
        batch = _as_list(prompts)
        params = _params_for(batch, sampling_params)
        request_ids: list[str] = []
        with deferred_interrupts() as deliver:
            try:
                for prompt, one in zip(
                    tqdm(batch, desc="Adding requests", disable=not use_tqdm), params, strict=True
                ):
                    request_ids.append(self._add(prompt, one, "final_only", truncate_prompt_tokens))
                    deliver()
                outputs = self._run(request_ids, use_tqdm, deliver)
            finally:
                self._forget(request_ids)
        return [outputs[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """One conversation ([{"role": …, "content": …}, …]) or a list of them, through the model's
        chat template (or the one given, which is rendered in a sandbox)."""
        conversations = _conversations(messages)
        prompts = [
            {
                "prompt_token_ids": self._tokenizer.encode(
                    self._tokenizer.apply_chat_template(
                        list(conversation),
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        chat_template=chat_template,
                    ),
                    add_special_tokens=False,  # the template writes them
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Cumulative outputs of one request, after every step that brought it tokens (or several,
        if ``generate`` is called in between). Closing the generator aborts the request."""
        (params,) = _params_for([prompt], sampling_params)
        request_ids: list[str] = []
        try:
            with deferred_interrupts():
                request_ids.append(self._add(prompt, params, "cumulative"))
            (request_id,) = request_ids
            while True:
                output = self._unread[request_id]
                if output is None:
                    with deferred_interrupts():
                        self._step()
                    continue
                self._unread[request_id] = None
                yield output
                if output.finished:
                    return
        finally:
            with deferred_interrupts():
                self._forget(request_ids)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_metrics(self) -> list[Metric]:
        """Counters and vectors since the start; each metric's help gives its formula."""
        return self.engine.get_metrics()

    def spec_stats(self) -> SpecDecodeStats:
        """Speculation statistics since the start."""
        return self.engine.spec_stats()

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """End the engine; requests, and streams that are open, are refused from now on. May be
        called again."""
        with self._lock:
            self._is_shut_down = True
            self.engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        output_kind: OutputKind,
        truncate_prompt_tokens: int | None = None,
    ) -> str:
        with self._lock:
            self._require_running()
            request_id = str(next(self._request_numbers))
            self.engine.add_request(
                request_id,
                prompt,
                params,
                output_kind=output_kind,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            self._unread[request_id] = None
            return request_id

    def _require_running(self) -> None:
        if self._is_shut_down:
            raise ValueError("this LLM was shut down: make a new one")

    def _step(self) -> None:
        """One step of the engine; its outputs wait for whoever asked for them."""
        with self._lock:
            self._require_running()
            for output in self.engine.step():
                if output.request_id in self._unread:
                    self._unread[output.request_id] = output

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Leave nothing of these requests behind, whether they finished or were interrupted."""
        with self._lock:
            for request_id in request_ids:
                self.engine.abort_request(request_id)
                self._unread.pop(request_id, None)

    def _run(
        self, request_ids: Sequence[str], use_tqdm: bool, after_step: Callable[[], None]
    ) -> dict[str, RequestOutput]:
        """Step until all these requests, added as "final_only", have finished."""
        outputs: dict[str, RequestOutput] = {}
        waiting = list(request_ids)
        num_input = num_output = 0
        with tqdm(total=len(waiting), desc="Processed prompts", disable=not use_tqdm) as bar:
            while waiting:
                self._step()
                after_step()
                finished = {one for one in waiting if self._unread[one] is not None}
                if not finished:
                    continue
                waiting = [one for one in waiting if one not in finished]
                for request_id in finished:
                    output = self._unread[request_id]
                    assert output is not None
                    outputs[request_id] = output
                    num_input += len(output.prompt_token_ids)
                    num_output += sum(len(sample.token_ids) for sample in output.outputs)
                seconds = max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(
                    f"est. speed input: {num_input / seconds:.2f} toks/s, "
                    f"output: {num_output / seconds:.2f} toks/s",
                    refresh=False,
                )
                bar.update(len(finished))
        return outputs


class _LoadingBar:
    """A progress bar over the tensors that a model takes."""

    def __init__(self, name: str, disable: bool) -> None:
        self._bar = tqdm(desc=f"Loading {name}", unit=" tensors", disable=disable, leave=False)

    def watch(self, weights: Weights) -> Weights:
        return _WatchedWeights(weights, self._bar)

    def __enter__(self) -> "_LoadingBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


class _WatchedWeights:
    def __init__(self, weights: Weights, bar: Any) -> None:
        self._weights = weights
        self._bar = bar

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        self._bar.update()
        return self._weights.take(name, shape)

    def finish(self) -> None:
        self._weights.finish()


def _engine_options(
    config: EngineConfig, executor: InprocExecutor, tokenizer: Tokenizer
) -> EngineOptions:
    """The engine's limits: as asked for, or as the model and usual sizes suggest."""
    max_model_len = config.max_model_len or executor.max_position
    if max_model_len > executor.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}, but {config.model} was made for contexts of "
            f"{executor.max_position} tokens: lower it"
        )
    step_tokens = config.max_num_batched_tokens
    if step_tokens is None:
        at_least = config.max_num_seqs if config.enable_chunked_prefill else max_model_len
        step_tokens = max(_DEFAULT_STEP_TOKENS, at_least)
    limits = SchedulerOptions(
        config.max_num_seqs, step_tokens, max_model_len, config.enable_chunked_prefill
    )
    return EngineOptions(
        vocab_size=executor.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        limits=limits,
        max_drafts=config.speculative.num_speculative_tokens if config.speculative else None,
        seed=config.seed,
        block_size=config.block_size,
        kv_cache_memory=config.kv_cache_memory,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    known = EngineConfig.__dataclass_fields__.keys() - {"model", "speculative"}
    for name in options:
        if name in ONLY_IN_VLLM:
            raise ValueError(f"LLM: {name!r} exists in vLLM but not in Eyas: leave it out")
        if name not in known:
            raise ValueError(
                f"LLM: unknown argument {name!r}: known are speculative_config, "
                f"use_tqdm_on_load, {', '.join(sorted(known))}"
            )


def _read_speculative(config: Mapping[str, Any] | None) -> SpeculativeOptions | None:
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(
            f"speculative_config is a {type(config).__name__}: give a dict with 'method' and "
            "'num_speculative_tokens'"
        )
    if not config:
        raise ValueError("speculative_config is empty: leave it out, or name a 'method'")
    return parse_speculative_config(config)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt in any of its forms, or several, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise ValueError(f"prompts is a {type(prompts).__name__}: give a prompt, or a list of them")
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(isinstance(item, Integral) for item in batch) else batch


def _conversations(messages: Sequence[Any]) -> list[Any]:
    """One conversation, or a list of them, as a list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"messages is a {type(messages).__name__}: give a list of messages")
    several = bool(messages) and all(
        isinstance(one, Sequence) and not isinstance(one, str) for one in messages
    )
    return list(messages) if several else [messages]


def _params_for(
    batch: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * len(batch)
    if not isinstance(given, Sequence) or not all(isinstance(x, SamplingParams) for x in given):
        raise ValueError(
            f"sampling_params is {str(given)[:60]!r}: give SamplingParams, or a list of them"
        )
    params = list(given)
    if len(params) != len(batch):
        raise ValueError(
            f"{len(params)} sampling_params for {len(batch)} prompts: give one, or one per prompt"
        )
    return params
