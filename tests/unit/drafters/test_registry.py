"""speculative_config: what it accepts, and how it says no."""

import pytest

from eyas.drafters.registry import available_methods, parse_speculative_config


def test_methods_are_the_files_of_the_folder() -> None:
    assert available_methods() == ["draft_model", "ngram", "suffix"]


def test_parses_each_method() -> None:
    options = parse_speculative_config(
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    )
    assert (options.method, options.num_speculative_tokens, options.acceptance) == (
        "ngram",
        5,
        "exact",
    )
    assert options.options.prompt_lookup_max == 3
    options = parse_speculative_config({"model": "x", "num_speculative_tokens": 2})
    assert (options.method, options.options.model) == ("draft_model", "x")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 3}, "needs 'method'"),
        ({"method": "eagle9", "num_speculative_tokens": 3}, "'eagle9' is not available"),
        ({"method": "base", "num_speculative_tokens": 3}, "'base' is not available"),
        ({"method": "../ngram", "num_speculative_tokens": 3}, "is not available"),
        ({"method": ["ngram"], "num_speculative_tokens": 3}, "is not available"),
        ({"method": "ngram"}, "num_speculative_tokens is None"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "ngram", "num_speculative_tokens": 2, "acceptance": "typical"}, "'typical'"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "unknown key 'model'"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs 'model'"),
    ],
)
def test_refuses(config, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_speculative_config(config)
