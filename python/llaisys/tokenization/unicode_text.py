"""Python strings that are valid Unicode."""


def clean_text(text: str) -> str:
    """`text` as valid Unicode: surrogate pairs joined, lone surrogates become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
