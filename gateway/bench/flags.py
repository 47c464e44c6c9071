"""The flags of `headrace bench`. All values stay texts here: `gateway/bench/options.py` checks them.

Light to import: the command line's help of all commands needs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

_SCHEMES: Final = ("http://", "https://", "unix:")
EPILOG: Final = """\
lengths:  512, uniform:100:900, normal:500:100, lognormal:500:200, exponential:300, zipf:1.2:2000
exit code: 0 done, 1 more requests failed than --max-failures allows, 2 wrong usage, 130 interrupted

  headrace bench http://localhost:8000 --concurrency 32 --requests 500 --warm-up 50
  headrace bench http://localhost:8000 --rate 20 --duration-s 60 --warm-up 10s --goodput ttft:300 tbt:60
  headrace bench http://localhost:8000 --concurrency 8 --turns 4 --shared-prefix-tokens 1000 --html out.html
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    url = parser.add_argument("url", metavar="URL", help="http://HOST:PORT, https://HOST:PORT or unix:PATH")
    _add_server(_group(parser, "Server"))
    _add_load(_group(parser, "Load"))
    _add_prompts(_group(parser, "Prompts and answers"))
    _add_report(_group(parser, "Report"), url)


class _Words(argparse.Action):
    """Takes words up to the next flag, and may be repeated.

    An address at their end is the URL: argparse gives all words to the flag, and then misses one.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, url: argparse.Action, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs="+", **more)
        self._url = url

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        words = list(values)
        if words[-1].startswith(_SCHEMES) and not hasattr(namespace, self._url.dest):
            setattr(namespace, self._url.dest, words.pop())
            self._url.required = False
        if not words:
            parser.error(f"argument {flag}: expected at least one argument")
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *words])


def _group(parser: argparse.ArgumentParser, title: str) -> Any:
    return parser.add_argument_group(title)


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("--model", metavar="NAME", help="model to ask [the first that the server lists]")
    add("--endpoint", metavar="{chat,completions}", help="/v1/chat/completions or /v1/completions [chat]")
    add("--api-key", metavar="KEY", help="key to send; HEADRACE_API_KEY does the same")
    add("--header", metavar="NAME:VALUE", action="append", help="header to send, may be repeated")
    add("--extra-body", metavar="JSON", help="object whose fields go over those of each request")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add("--timeout-s", metavar="SECONDS", help="longest time for one answer [300]")
    add("--no-keep-alive", action="store_true", help="a connection of its own for each request")
    add("--timings", action=argparse.BooleanOptionalAction, help="ask for stages [if it is Headrace]")


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--rate", metavar="R", help="open loop: conversations begun a second, whatever the server does")
    add("--arrivals", metavar="{poisson,constant}", help="of an open loop [poisson]")
    add("--max-concurrency", metavar="N", help="of an open loop: most requests in flight [no limit]")
    add("--concurrency", metavar="N", help="closed loop: conversations at any time [16, without --rate]")
    add("--requests", metavar="N", help="how many to measure [100, without --duration-s or --data]")
    add("--duration-s", metavar="SECONDS", help="for how long new ones are begun and measured")
    add("--warm-up", metavar="N|Ns", help="requests, or seconds with an s, before what is measured [0]")
    add("--ramp-s", metavar="SECONDS", help="time in which the rate or the concurrency rises from 0 [0]")
    add("--seed", metavar="N", help="of arrivals and lengths, and of words but for each prompt's first [0]")


def _add_prompts(group: Any) -> None:
    add = group.add_argument
    add("--prompt-tokens", metavar="LENGTH", help="with the chat template, as the server counts [512]")
    add("--output-tokens", metavar="LENGTH", help="of each answer [128]")
    add(
        "--no-ignore-eos", action="store_true", help="answers may end earlier; for servers without ignore_eos"
    )
    add("--tokenizer", metavar="PATH", help="model folder or tokenizer.json, for exact prompt lengths")
    add("--shared-prefix-tokens", metavar="N", help="system prompt before it, shared by many [0]")
    add("--num-prefixes", metavar="N", help="how many different ones there are [1]")
    add("--turns", metavar="N", help="of each conversation, with the answers in between [1]")
    add("--turn-gap-s", metavar="SECONDS", help="from an answer's end to the next turn [0]")
    add(
        "--same-prompts",
        action="store_true",
        help="the same words in each run with a seed; a server that has had them finds them in its cache",
    )
    add("--data", metavar="FILE", help="JSON lines with messages or prompt, or ShareGPT's JSON")


def _add_report(group: Any, url: argparse.Action) -> None:
    add = group.add_argument
    add("--json", metavar="FILE", help="write all figures as JSON; - for standard output")
    add("--samples", action="store_true", help="put each request into the JSON")
    add("--html", metavar="FILE", help="write a page with diagrams")
    add("--name", metavar="NAME", help="of this run, in the page [this run]")
    words = {"action": _Words, "url": url}
    add("--compare", metavar="FILE", help="JSON of earlier runs, to show beside it in the page", **words)
    add("--goodput", metavar="NAME:MS", help="limits of a good request: ttft, tpot, tbt, e2e", **words)
    add("--percentiles", metavar="P,P", help="which are shown [50,90,95,99]")
    add("--stall-ms", metavar="MS", help="gap that is a stall [3 times the median gap, at least 20]")
    add("--max-failures", metavar="SHARE", help="share of requests that may fail, 0.01 or 1%% [0]")
    add("--progress", metavar="{auto,on,off}", help="line of progress on standard error [auto: a terminal]")
