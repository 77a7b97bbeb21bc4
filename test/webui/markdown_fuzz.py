"""Documents for the fuzz test of the Markdown renderer: random ones and adversarial ones."""

from __future__ import annotations

import random

FRAGMENTS = (
    *"*_~`$[](){}<>|\\!#-+>=:^&'\" \n\tab1é漢😀",
    *("**", "***", "~~", "```", "$$", "\\(", "\\)", "\\[", "\\]", "](", "](https://a.example/b)"),
    *("\n\n", "\n- ", "\n  - ", "\n1. ", "\n> ", "\n# ", "\n| a | b |\n|--|--|\n| ", "\n```py\n"),
    *("\\frac{", "\\sqrt[", "x^", "_{", "\\hat ", "\\left(", "\\right)", "\\begin{matrix}"),
    *("\\end{matrix}", " & ", "\\\\", "\\text{", "- [ ] ", "<think>", "</think>", "<br>"),
    *("http://", "https://a.example", "word ", "some more words ", "\u2028", "\r\n", "\x00"),
)

# Each pattern is repeated up to the length of the document.
REPEATED = (
    "x^a", "^a", "{", "}", "$", "$$", "$a ", "$a$ ", "\\(", "\\(a\\)", "\\hat ", "\\sqrt ",
    "\\left(", "\\frac", "\\begin{matrix} a & ", "&", "a\\\\", ">", "> ", "> a\n", "- ", "- > ",
    "1. ", "  ", " \n", "- a\n", "*", "*a ", "*a", "*a* ", "**a ", "***a* ", "_a ", "_*a ", "~~a ",
    "*a **b ", "`", "`a ``b ", "[", "![", "[a](", "[a](b ", "[](a\"", "|", "| a ", "```\n",
    "# ", "#", "<https://", "http://", "\\*", "a|\n|",
)  # fmt: skip
# {0}: a pattern repeated up to the length of the document.
FRAMES = (
    ("$$x{0}$$", "^a"),
    ("$${0}a$$", "\\hat "),
    ("$${0}a$$", "{"),
    ("$$\\left({0}\\right)$$", "(a)"),
    ("$$\n{0}", "x\n"),
    ("$$\\begin{{matrix}}{0}\\end{{matrix}}$$", "a&"),
    ("[a]({0}x", " "),
    ("{0}](b)", "["),
    ("``` {0}`", " "),
    ("# a{0}b", " "),
    ("```\n{0}", "a b "),
    ("```py\n{0}", "'\\"),
    ("|a|b|\n|-|-|\n{0}", "*a* "),
    ("|a|b|\n|-|-|\n{0}", "|\n"),
    ("{0}", "[1,"),
    ("[{0}1]", "1,"),
    ("<think>{0}", "> "),
)
LISTS = "".join("  " * depth + "- a\n" for depth in range(130))
DIGITS = "".join(f"{'`' * n}a " for n in range(1, 140))


def random_documents(count: int, seed: int = 1) -> list[str]:
    """Documents of 100 to 1,500 characters. Half of them repeat few fragments."""
    rng = random.Random(seed)
    documents = []
    for i in range(count):
        fragments = rng.sample(FRAGMENTS, rng.randint(2, 5)) if i % 2 else FRAGMENTS
        length = rng.choice((100, 300, 600, 1500))
        document = ""
        while len(document) < length:
            document += rng.choice(fragments)
        documents.append(document)
    return documents


def adversarial_documents(length: int) -> list[str]:
    columns = "|a" * 1000 + "|\n" + "|-" * 1000 + "|\n" + "a\n" * (length // 4)
    nested = "[" * (length // 5) + "1" + "]" * (length // 5)
    framed = [frame.format(part * (length // len(part))) for frame, part in FRAMES]
    return [
        *(part * (length // len(part)) for part in REPEATED),
        *framed,
        LISTS,
        DIGITS,
        columns,
        nested,
    ]
