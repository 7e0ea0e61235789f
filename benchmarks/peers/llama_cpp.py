"""llama.cpp through llama-cpp-python's low-level interface: ids go in, and times are exact."""

import ctypes
import sys
import time
from collections.abc import Sequence
from typing import Any

# This file bears the package's name, and a script's folder is searched first: make it the last.
sys.path.append(sys.path.pop(0))
import llama_cpp as llama
import numpy as np
from protocol import random_tokens, require, serve, versions

_FLASH_ATTENTION = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_CACHE_TYPES = {
    "f32": llama.GGML_TYPE_F32,
    "f16": llama.GGML_TYPE_F16,
    "bf16": 30,  # which llama-cpp-python has no name for
    "q8_0": llama.GGML_TYPE_Q8_0,
}
_LOG_ERROR = 4
_LEAST_CONTEXT = 1024  # of a sequence: most tasks then find the context that the last one left


@llama.llama_log_callback
def _log(level: int, text: bytes, user_data: int) -> None:
    if level == _LOG_ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


class LlamaCpp:
    """``mmap`` maps the file, else it is read; ``repack`` lets llama.cpp store weights anew in its
    own layouts, where it has one."""

    def __init__(
        self,
        model: str,
        threads: int,
        flash_attention: str = "auto",
        n_batch: int = 2048,
        n_ubatch: int = 512,
        cache_type: str = "f16",
        mmap: bool = True,
        repack: bool = True,
    ) -> None:
        for value, known in ((flash_attention, _FLASH_ATTENTION), (cache_type, _CACHE_TYPES)):
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        self._settings = {
            "flash_attention": flash_attention,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "cache_type": cache_type,
            "mmap": mmap,
            "repack": repack,
        }
        self._threads = threads
        llama.llama_log_set(_log, ctypes.c_void_p())
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.load_mode = llama.LLAMA_LOAD_MODE_MMAP if mmap else llama.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = repack
        self._model = llama.llama_model_load_from_file(require(model).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp can't load {model}")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(n_batch, 0, 1)
        self._context: Any = None
        self._shape = (0, 0)
        self._filled = -1  # tokens in the context that ``forward`` left behind

    def facts(self) -> dict[str, Any]:
        return {
            "versions": versions("llama-cpp-python"),
            "settings": self._settings,
            "system": llama.llama_print_system_info().decode(),
        }

    def prefill(self, prompt: Sequence[int]) -> float:
        return self.batch([prompt], 1)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        return self.request(prompt, num_tokens)["decode"]

    def request(self, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
        self._open(1, len(prompt) + num_tokens)
        started = time.perf_counter()
        _, times = self._run([prompt], num_tokens)
        decode = (times[-1] - times[0]) / (num_tokens - 1)
        return {"prefill": times[0] - started, "decode": decode}

    def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        self._open(len(prompts), max(map(len, prompts)) + num_tokens)
        started = time.perf_counter()
        _, times = self._run(prompts, num_tokens)
        return times[-1] - started

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        self._open(1, len(prompt) + num_tokens)
        tokens, _ = self._run([prompt], num_tokens)
        return [row[0] for row in tokens]

    def forward(self, context_len: int, m: int) -> float:
        """Seconds of one forward of ``m`` tokens after ``context_len`` others, with the logits of
        all ``m``. The context is kept for the next call of the same length."""
        tokens = random_tokens(context_len + m)
        if self._filled != context_len:
            self._open(1, context_len + m)
            if context_len:
                self._first([tokens[:context_len]])
            self._filled = context_len
        rows = [(token, context_len + j, 0, True) for j, token in enumerate(tokens[context_len:])]
        started = time.perf_counter()
        self._compute(rows)
        self._logits(m - 1)  # waits for them
        seconds = time.perf_counter() - started
        memory = llama.llama_get_memory(self._context)
        assert llama.llama_memory_seq_rm(memory, 0, context_len, -1)
        return seconds

    def _run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[list[list[int]], list[float]]:
        """Each step's tokens, one per prompt, and the time at which they were known."""
        tokens = [self._first(prompts)]
        times = [time.perf_counter()]
        for step in range(num_tokens - 1):
            rows = [
                (token, len(prompt) + step, i, True)
                for i, (token, prompt) in enumerate(zip(tokens[-1], prompts, strict=True))
            ]
            self._compute(rows)
            tokens.append([self._best(row) for row in range(len(rows))])
            times.append(time.perf_counter())
        return tokens, times

    def _open(self, num_sequences: int, num_tokens: int) -> None:
        """An empty context with room for that many sequences of ``num_tokens`` each."""
        self._filled = -1
        if self._shape[0] == num_sequences and self._shape[1] >= num_tokens:
            llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
            return
        if self._context:
            llama.llama_free(self._context)
        params = llama.llama_context_default_params()
        room = max(_LEAST_CONTEXT, -(-num_tokens // 256) * 256)
        params.n_ctx = num_sequences * room
        params.n_seq_max = num_sequences
        params.n_batch = self._settings["n_batch"]
        params.n_ubatch = self._settings["n_ubatch"]
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = _FLASH_ATTENTION[str(self._settings["flash_attention"])]
        params.type_k = params.type_v = _CACHE_TYPES[str(self._settings["cache_type"])]
        params.no_perf = True
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        self._shape = (num_sequences, room)

    def _first(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first output token of each prompt, which come in as few batches as possible."""
        rows = [
            (token, position, i, position == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        first = []
        size = int(self._settings["n_batch"])
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            self._compute(chunk)
            first += [self._best(i) for i, row in enumerate(chunk) if row[3]]
        return first

    def _compute(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One batch: token, position, sequence, and whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens returned {status}")

    def _logits(self, row: int) -> Any:
        pointer = llama.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self._vocabulary,))

    def _best(self, row: int) -> int:
        return int(self._logits(row).argmax())


if __name__ == "__main__":
    serve(LlamaCpp)
