"""The tokenizer process: reads a model's vocabulary once, then forks a process for every grammar.

    python -m llaisys.engine.structured.fork_server FD      (started by the engine, never by hand)

It has one thread, so a fork of it is whole; the pages of the vocabulary are shared by all of them.
It ends when the engine does: its socket does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from llguidance import LLTokenizer

from llaisys.common.errors import LlaisysError
from llaisys.engine.structured import grammar_process
from llaisys.engine.structured.matching import open_tokenizer
from llaisys.engine.structured.messages import Compile, Opened, Vocabulary, receive, send
from llaisys.tokenization import Tokenizer, TokenizerSource


def open_vocabulary(vocabulary: Vocabulary) -> LLTokenizer:
    """Raises LlaisysError when its tokens have no bytes of their own, or none ends an answer."""
    source = TokenizerSource(
        directory=None if vocabulary.directory is None else Path(vocabulary.directory),
        vocabulary=vocabulary.bpe,
        special_ids=vocabulary.special_ids,
        eos_token_ids=vocabulary.eos_token_ids,
    )
    tokenizer = Tokenizer.from_source(source)
    size = vocabulary.vocab_size
    tokens = tokenizer.vocabulary_bytes(size)
    ends = {*vocabulary.eos_token_ids, *tokenizer.eos_token_ids}
    inside = sorted(token for token in ends if 0 <= token < size)
    if not inside:
        raise LlaisysError("the model has no token that ends an answer")
    special = sorted(token for token in tokenizer.special_ids if token < size)
    return open_tokenizer(tokens, special, inside, lambda text: tokenizer.encode(text, False))


def serve(engine: socket.socket) -> None:
    vocabulary, _ = receive(engine, Vocabulary)
    try:
        tokenizer = open_vocabulary(vocabulary)
    except Exception as error:
        send(engine, Opened(f"{error}"))
        return
    send(engine, Opened())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        order, (connection, memory) = receive(engine, Compile, max_fds=2)
        if not os.fork():
            engine.close()
            grammar_process.run(tokenizer, order, socket.socket(fileno=connection), memory)
        os.close(connection)
        os.close(memory)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with contextlib.suppress(EOFError):  # the engine is gone
        serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
