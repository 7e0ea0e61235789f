"""Speculative decoding offline; the same program as ``eyas spec-decode``.

python examples/offline_inference/spec_decode.py --method ngram --num_spec_tokens 4 --num_prompts 8
"""

import sys

from eyas.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["spec-decode", *sys.argv[1:]]))
