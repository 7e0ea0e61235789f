"""A two-turn chat: the second turn reuses the first one's cached prefix."""

from eyas import LLM, SamplingParams


def main() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    with LLM("demo", speculative_config=speculation) as llm:
        messages: list[dict[str, str]] = []
        for question in ("Name three rivers in Europe.", "Which of them is the longest?"):
            messages.append({"role": "user", "content": question})
            [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
            messages.append({"role": "assistant", "content": answer.outputs[0].text})
            print(f"you: {question}\nmodel: {answer.outputs[0].text}\n")


if __name__ == "__main__":
    main()
