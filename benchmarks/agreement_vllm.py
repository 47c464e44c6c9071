"""`vllm bench serve` with prompts from a file, as a process of its own: its client and figures as they are.

Its own command needs the package `vllm` by that name, which the CPU build does not have, and for a prompt
file pandas. So the file is read here, and all else is `vllm.benchmarks.serve`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser


def _given(arguments: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """The prompts of the file; their lengths come from the server's usage."""
    with open(arguments.dataset_path, encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    return [
        SampleRequest(prompt=entry["prompt"], prompt_len=0, expected_output_len=entry["output_tokens"])
        for entry in entries[: arguments.num_prompts]
    ]


def main() -> None:
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.get_samples = _given
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
