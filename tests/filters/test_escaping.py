"""Escaping: character by character, and what a browser or a Markdown renderer makes of it is the text."""

from __future__ import annotations

import html
import random
import re
import string

import pytest
from markdown_it import MarkdownIt

from filters.escaping import ESCAPES, escape_function

SAMPLES = [
    "# Title\n\n- item\n1. one\n1) one\n+ plus\n* star\n---\n===\n***",
    "**bold** _it_ __b__ `code` ``` fence\n~~~\nx\n~~~\n~~gone~~ ==mark== ^sup^ H~2~O",
    "[a](http://x.y 'title') ![i](u) [r]: http://z \"t\" <http://a.b> <a@b.c> <b>html</b> <!-- c --> [^1]: n",
    "|a|b|\n|:-|-:|\n|1|2|\n\n:-- | --:",
    '&amp; &#35; &copy; \\* a\\\nb 100% $x^2$ {#id} :smile: @you #tag 3.14 it\'s "so"; a/b? c, d!',
    "> quote\n>> more\n\n```html\n<script>alert(1)</script>\n```\nTitle\n=====\nOther\n-----\n",
    "www.example.com https://example.com/a_b?c=d me@example.com\n你好，世界！😀 <｜end▁of▁sentence｜>",
]


def escape(name: str, text: str) -> str:
    function = escape_function(name)
    assert function is not None
    return function(text)


def random_text(rng: random.Random) -> str:
    alphabet = string.punctuation + string.punctuation + "a1 你\n"
    text = "".join(rng.choices(alphabet, k=rng.randint(1, 30)))
    return re.sub(" {2,}|(?m:^ | $)", "", text)  # layout stays layout


def rendered(markdown: str) -> str:
    """The text that a reader sees, without what only layout makes of it."""
    page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown)
    return html.unescape(re.sub(r"</?p>|<br />", "", page))


def lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def test_none_is_no_function_and_other_names_are_refused() -> None:
    assert ESCAPES == ("none", "html", "markdown")
    assert escape_function("none") is None
    with pytest.raises(ValueError, match="'xml'; it may be none, html, markdown"):
        escape_function("xml")


def test_html_makes_entities_of_five_characters() -> None:
    assert escape("html", '<a href="x">&\'敏') == "&lt;a href=&quot;x&quot;&gt;&amp;&#39;敏"


def test_markdown_puts_backslashes_before_syntax_only() -> None:
    assert escape("markdown", "1. **a** 你好, it's 5/6; ok?") == "1\\. \\*\\*a\\*\\* 你好, it's 5/6; ok?"


@pytest.mark.parametrize("name", ["html", "markdown"])
def test_text_without_such_characters_is_returned_itself(name: str) -> None:
    text = "nothing to escape, 没有"
    assert escape(name, text) is text


@pytest.mark.parametrize("name", ["html", "markdown"])
def test_every_split_gives_the_same(name: str) -> None:
    rng = random.Random(1)
    for text in [*SAMPLES, *(random_text(rng) for _ in range(100))]:
        whole = escape(name, text)
        assert "".join(escape(name, char) for char in text) == whole
        for cut in range(len(text)):
            assert escape(name, text[:cut]) + escape(name, text[cut:]) == whole


def test_html_reads_back_as_the_text() -> None:
    rng = random.Random(2)
    for text in [*SAMPLES, *(random_text(rng) for _ in range(200))]:
        escaped = escape("html", text)
        assert html.unescape(escaped) == text
        assert not set(escaped) & set("<>\"'")


def test_markdown_takes_backslashes_before_ascii_punctuation_only() -> None:
    """Before anything else a backslash is a backslash (CommonMark 0.31, section 2.4)."""
    text = string.printable + "你😀"
    escaped = escape("markdown", text)
    assert all(char in string.punctuation for char in re.findall(r"\\(.)", escaped, re.DOTALL))
    assert re.sub(r"\\(.)", r"\1", escaped) == text


def test_markdown_escapes_these_characters() -> None:
    escaped = [char for char in map(chr, range(0x250)) if escape("markdown", char) != char]
    assert "".join(escaped) == "!#$&()*+-.:<=>@[\\]^_`{|}~"


def test_markdown_renders_as_the_text() -> None:
    rng = random.Random(3)
    for text in [*SAMPLES, *(random_text(rng) for _ in range(1500))]:
        assert lines(rendered(escape("markdown", text))) == lines(text), text


def test_rendering_without_escaping_differs() -> None:
    """The test above can fail: each sample means something in Markdown."""
    for text in SAMPLES[:6]:
        assert lines(rendered(text)) != lines(text), text
