"""``eyas demo``: the demo model with and without speculation, and whether the outputs agree."""

import argparse
import textwrap
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eyas.cli.arguments import positive

if TYPE_CHECKING:
    from eyas.engine.output import RequestOutput
    from eyas.llm import LLM
    from eyas.sampling.params import SamplingParams

NAME = "demo"
HELP = "generate with and without speculation and compare, on the demo model"
DESCRIPTION = (
    "Generate the same texts plainly and with n-gram speculation; show the text, the drafts'"
    " statistics and both speeds. Exit status 1 if the outputs differ in any bit."
)

# Half of them quote their source, which n-gram drafts like; half do not.
CATEGORIES = ("summarisation", "extraction", "RAG", "coding", "reasoning", "writing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command's flags."""
    parser.add_argument("--model", default="demo", metavar="NAME", help="as in eyas generate")
    parser.add_argument(
        "--output-len", type=positive, default=96, metavar="N", help="most output tokens"
    )
    parser.add_argument(
        "--num-spec-tokens", type=positive, default=4, metavar="K", help="tokens per draft"
    )


@dataclass(slots=True)
class Side:
    """One of the two engines, and what it has done so far."""

    llm: "LLM"
    outputs: list["RequestOutput"] = field(default_factory=list)
    seconds: float = 0.0

    def generate(self, prompt: list[int], params: "SamplingParams") -> None:
        """One request, timed."""
        from eyas.cli.outputs import checked

        started = time.perf_counter()
        request: Any = {"prompt_token_ids": prompt}
        self.outputs += checked(self.llm.generate([request], params, use_tqdm=False))
        self.seconds += time.perf_counter() - started

    def rate(self) -> float:
        """Output tokens per second."""
        num_tokens = sum(len(output.outputs[0].token_ids) for output in self.outputs)
        return num_tokens / self.seconds


def run(args: argparse.Namespace) -> int:
    """Both engines take turns, prompt by prompt; then the texts, the table and the verdict."""
    from eyas.llm import LLM

    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 2048}
    config = {"method": "ngram", "num_speculative_tokens": args.num_spec_tokens}
    print(f"{args.model}, twice: plain, and with n-gram speculation", flush=True)
    with (
        LLM(args.model, **options) as plain_llm,
        LLM(args.model, speculative_config=config, **options) as speculative_llm,
    ):
        plain, speculative = Side(plain_llm), Side(speculative_llm)
        _take_turns(plain, speculative, args.output_len)
        stats = speculative_llm.spec_stats()

    from eyas.engine.spec_report import format_report

    for category, output in zip(CATEGORIES, speculative.outputs, strict=True):
        text = " ".join(output.outputs[0].text.split())
        print(textwrap.fill(f"[{category}] {text}", width=96, max_lines=3, placeholder=" ..."))
    print(format_report(stats))
    return _print_verdict(plain, speculative)


def _take_turns(plain: Side, speculative: Side, output_len: int) -> None:
    """Each prompt on both sides in turn, so that a busy machine slows both alike."""
    from tqdm import tqdm

    from eyas.cli.datasets import load_prompts, prompt_token_ids
    from eyas.sampling.params import SamplingParams

    first = {prompt.category: prompt for prompt in reversed(load_prompts(None))}
    prompts = [first[category] for category in CATEGORIES]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, logprobs=0)
    bar = tqdm(prompt_token_ids(plain.llm.get_tokenizer(), prompts, chat_template=True))
    bar.set_description("Processed prompts")
    for prompt in bar:
        plain.generate(prompt, params)
        speculative.generate(prompt, params)
        bar.set_postfix_str(
            f"plain {plain.rate():.1f} tok/s, speculative {speculative.rate():.1f} tok/s"
        )


def _print_verdict(plain: Side, speculative: Side) -> int:
    from eyas.cli.comparison import Comparison

    comparison = Comparison()
    comparison.add("speculative", plain.outputs, speculative.outputs)
    print(
        f"plain {plain.rate():.1f} tok/s, speculative {speculative.rate():.1f} tok/s:"
        f" {speculative.rate() / plain.rate():.2f} times as fast, one request at a time"
    )
    verdict = "no" if comparison.differences else "yes"
    print(
        f"outputs identical: {verdict} ({comparison.num_tokens} tokens,"
        f" {comparison.num_logprobs} log-probabilities compared bit for bit)"
    )
    for difference in comparison.differences:
        print(difference)
    return 1 if comparison.differences else 0
