"""A Markdown text with every construct that the page supports."""

from __future__ import annotations

DOCUMENT = """# Title with `code`

A paragraph with **bold**, *italic*, ***both***, ~~gone~~, snake_case_names and 2 * 3 * 4.
Next line. A [link](https://example.org/a_b?c=1&d=(2)), <https://example.com> and https://example.net/x.

- one
- two
  - deeper **x**
    1. deepest
- three

  with a second paragraph

3. counted from three
4. on

> quoted
> > twice
> - and a list

| Left | Right | Mid |
|:--|--:|:-:|
| a | 1 | `x | y` |
| b \\| c | 22 |
not a row of its own

```python
def f(x):  # comment
    return "a" + '''open
still''' + 1
```

1. item with code:
   ```sh
   echo "hi" | cat
   ```
2. after

***

Trailing *unfinished **text with a [link](https://
"""
