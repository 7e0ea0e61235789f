"""``eyas spec-decode``: run a prompt set with speculation and report how well drafts did."""

import argparse
from typing import TYPE_CHECKING, Any

from eyas.cli.arguments import (
    add_limit_arguments,
    add_sampling_arguments,
    add_speculation_arguments,
    engine_options,
    positive,
    speculative_config,
)

if TYPE_CHECKING:
    from eyas.sampling.params import SamplingParams

NAME = "spec-decode"
HELP = "run a prompt set with speculation and report acceptance"
DESCRIPTION = (
    "Generate from a prompt set and report drafts, acceptance by position and tokens per forward."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command's flags; ``--model-dir`` and others keep the names of vLLM's script."""
    data = parser.add_argument_group("prompts and output")
    data.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="Spec-Bench/MT-bench JSONL, ShareGPT JSON or plain text; none is the built-in set",
    )
    data.add_argument("--num-prompts", type=positive, metavar="N", help="take the first N prompts")
    data.add_argument(
        "--no-chat-template", action="store_true", help="use prompts as they stand, not as a chat"
    )
    data.add_argument(
        "--output-len", type=positive, default=128, metavar="N", help="most output tokens"
    )
    data.add_argument("--print-output", action="store_true", help="print each prompt and its text")
    add_speculation_arguments(parser, method="ngram")
    add_sampling_arguments(parser, temperature=0.0)
    limits = parser.add_argument_group("model and limits")
    limits.add_argument(
        "--model-dir",
        default="demo",
        metavar="NAME",
        help="a Hugging Face directory, a GGUF file, a Hub id, or demo",
    )
    limits.add_argument("--eagle-dir", metavar="NAME", help="an EAGLE draft: not in this version")
    limits.add_argument(
        "--tp", type=positive, default=1, metavar="N", help="tensor-parallel size: only 1 so far"
    )
    limits.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split long prompts over steps",
    )
    add_limit_arguments(limits)


def run(args: argparse.Namespace) -> int:
    """Generate, then print the statistics."""
    _refuse_what_is_missing(args)
    config = speculative_config(args)

    from eyas.cli.datasets import load_prompts, prompt_token_ids

    prompts = load_prompts(args.dataset_path, args.num_prompts)

    from eyas.cli.outputs import checked
    from eyas.engine.spec_report import domination_warnings, format_report, low_acceptance_warning
    from eyas.llm import LLM

    with LLM(args.model_dir, speculative_config=config, **engine_options(args)) as llm:
        token_ids = prompt_token_ids(llm.get_tokenizer(), prompts, not args.no_chat_template)
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in token_ids]
        outputs = checked(llm.generate(requests, sampling_params(args)))
        if args.print_output:
            for prompt, output in zip(prompts, outputs, strict=True):
                print(f"prompt: {prompt.text}\noutput: {output.outputs[0].text}\n")
        stats = llm.spec_stats()
    print(format_report(stats))
    warnings = [low_acceptance_warning(stats), *domination_warnings(outputs)]
    for warning in filter(None, warnings):
        print(f"warning: {warning}")
    return 0


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    """The parsed sampling flags as SamplingParams."""
    from eyas.sampling.params import SamplingParams

    return SamplingParams(
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.output_len,
    )


def _refuse_what_is_missing(args: argparse.Namespace) -> None:
    if args.tp != 1:
        raise ValueError(f"--tp {args.tp}: this version runs on one rank only; leave --tp at 1")
    if args.eagle_dir is not None:
        raise ValueError("--eagle-dir: EAGLE drafts are not in this version; use --method ngram")
