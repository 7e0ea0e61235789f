"""``eyas generate``: text for one or more prompts."""

import argparse
import sys

from eyas.cli.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    add_speculation_arguments,
    engine_options,
    positive,
    speculative_config,
)

NAME = "generate"
HELP = "generate text for one or more prompts"
DESCRIPTION = "Generate text for the prompts given, or for standard input as one prompt."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command's flags."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="none: read standard input")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="at most")
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at TEXT; repeatable")
    parser.add_argument("-n", type=positive, default=1, help="samples per prompt")
    parser.add_argument(
        "--stream", action="store_true", help="print text as it comes (one prompt, one sample)"
    )
    add_sampling_arguments(parser, temperature=0.0)
    add_speculation_arguments(parser, method="ngram")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print; several texts are set apart by a line that says whose they are."""
    texts: list[str] = args.prompts or [sys.stdin.read()]
    if args.stream and (len(texts) > 1 or args.n > 1):
        raise ValueError("--stream prints one text: give one prompt, and leave -n at 1")
    config = speculative_config(args)

    from eyas.cli.datasets import Prompt, prompt_token_ids
    from eyas.cli.outputs import checked
    from eyas.llm import LLM
    from eyas.sampling.params import SamplingParams

    params = SamplingParams(
        n=args.n,
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=args.stop,
        max_tokens=args.max_tokens,
    )
    with LLM(args.model, speculative_config=config, **engine_options(args)) as llm:
        ids = prompt_token_ids(llm.get_tokenizer(), [Prompt(text) for text in texts], args.chat)
        if args.stream:
            shown = 0
            for output in llm.stream(ids[0], params):
                text = checked([output])[0].outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
            print()
            return 0
        requests = [{"prompt_token_ids": prompt} for prompt in ids]
        outputs = checked(llm.generate(requests, params, use_tqdm=len(ids) > 1))
    several = len(outputs) > 1 or args.n > 1
    for i, output in enumerate(outputs):
        for sample in output.outputs:
            if several:
                print(f"--- prompt {i + 1}, sample {sample.index + 1}")
            print(sample.text)
    return 0
