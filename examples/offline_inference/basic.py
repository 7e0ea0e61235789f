"""Offline generation with vLLM's names: only the import differs."""

from eyas import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The capital of France is",
    "Speculative decoding is",
]


def main() -> None:
    llm = LLM("demo", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, seed=7, max_tokens=32))
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    llm.shutdown()


if __name__ == "__main__":
    main()
