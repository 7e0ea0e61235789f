"""``eyas verify``: is the output the same bits with and without speculation, in every batch mix?"""

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eyas.cli.arguments import (
    add_model_arguments,
    add_speculation_arguments,
    engine_options,
    positive,
    speculative_config,
)

if TYPE_CHECKING:
    from eyas.engine.output import RequestOutput

NAME = "verify"
HELP = "check that speculation and batching change no bit of the output"
DESCRIPTION = (
    "Run prompts plainly and alone, then with speculation, all together and in small prefill"
    " chunks; compare token ids and log-probabilities bit for bit. Exit status 1 if any differ."
)


@dataclass(frozen=True, slots=True)
class Mix:
    """One way to run the same requests. ``together`` submits all at once, else one by one."""

    name: str
    speculate: bool
    together: bool
    options: dict[str, Any] = field(default_factory=dict)


REFERENCE = Mix("plain, alone", False, False, {"enable_prefix_caching": False})
MIXES = (
    Mix("plain, together", False, True),
    Mix("speculative, alone", True, False, {"enable_prefix_caching": False}),
    Mix("speculative, together", True, True),
    Mix(
        "speculative, together, chunks of at most 24 tokens",
        True,
        True,
        {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command's flags."""
    parser.add_argument(
        "--dataset-path", metavar="FILE", help="prompts as in spec-decode; none is the built-in set"
    )
    parser.add_argument(
        "--num-prompts", type=positive, default=12, metavar="N", help="take the first N prompts"
    )
    parser.add_argument(
        "--no-chat-template", action="store_true", help="use prompts as they stand, not as a chat"
    )
    parser.add_argument(
        "--output-len", type=positive, default=64, metavar="N", help="most output tokens"
    )
    parser.add_argument(
        "--temp",
        type=float,
        nargs="+",
        default=[0.0, 0.8],
        metavar="T",
        help="temperatures; each prompt runs at each (default: 0 and 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first request")
    parser.add_argument(
        "--logprobs", type=int, default=3, metavar="N", help="top log-probabilities compared"
    )
    add_speculation_arguments(parser, method="ngram")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run every mix, report, and return 1 if anything differs."""
    if args.method == "None":
        raise ValueError("--method None leaves nothing to verify: use ngram or draft_model")
    if args.acceptance != "exact":
        raise ValueError(
            "--acceptance rejection keeps the distribution, not the text; only exact keeps both"
        )
    config = speculative_config(args)

    from eyas.cli.comparison import Comparison
    from eyas.cli.datasets import load_prompts

    prompts = load_prompts(args.dataset_path, args.num_prompts)
    reference = _run_mix(REFERENCE, args, config, prompts)
    total = Comparison()
    for mix in MIXES:
        comparison = Comparison()
        comparison.add(mix.name, reference, _run_mix(mix, args, config, prompts))
        differing = len(comparison.differences)
        verdict = f"{differing} requests differ" if differing else "identical"
        print(f"{mix.name}: {comparison.num_tokens} tokens compared, {verdict}")
        total.num_tokens += comparison.num_tokens
        total.num_logprobs += comparison.num_logprobs
        total.differences += comparison.differences
    print(
        f"compared {total.num_tokens} tokens and, bit for bit, {total.num_logprobs}"
        f" log-probabilities of {len(reference)} requests with: {REFERENCE.name}"
    )
    if total.differences:
        print(f"first difference: {total.differences[0]}")
        return 1
    print("no difference")
    return 0


def _run_mix(
    mix: Mix, args: argparse.Namespace, config: dict[str, Any] | None, prompts: list[Any]
) -> list["RequestOutput"]:
    """Every prompt at every temperature, in an engine of its own."""
    from eyas.cli.datasets import prompt_token_ids
    from eyas.cli.outputs import checked
    from eyas.llm import LLM
    from eyas.sampling.params import SamplingParams

    options = {**engine_options(args), **mix.options}
    with LLM(args.model, speculative_config=config if mix.speculate else None, **options) as llm:
        ids = prompt_token_ids(llm.get_tokenizer(), prompts, not args.no_chat_template)
        requests: list[Any] = [{"prompt_token_ids": one} for one in ids for _ in args.temp]
        params = [
            SamplingParams(
                temperature=temperature,
                seed=args.seed + i,
                max_tokens=args.output_len,
                logprobs=args.logprobs,
            )
            for i in range(len(ids))
            for temperature in args.temp
        ]
        if mix.together:
            return checked(llm.generate(requests, params, use_tqdm=True))
        outputs: list[RequestOutput] = []
        for request, own in zip(requests, params, strict=True):
            outputs += llm.generate([request], own, use_tqdm=False)
        return checked(outputs)
