"""The tokenizer process: loads a model's vocabulary once, then forks a process for every grammar.

    python -m llaisys.engine.structured.fork_server FD      (started by the engine)

It has one thread, so it can be forked safely; the forks share the pages of the vocabulary.
It exits when its socket is closed.
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
    """Open a tokenizer; LlaisysError: its tokens have no bytes, or the model has no end token."""
    source = TokenizerSource(
        directory=None if vocabulary.directory is None else Path(vocabulary.directory),
        vocabulary=vocabulary.bpe,
        special_ids=vocabulary.special_ids,
        eos_token_ids=vocabulary.eos_token_ids,
    )
    tokenizer = Tokenizer.from_source(source)
    size = vocabulary.vocab_size
    tokens = tokenizer.vocabulary_bytes(size)
    eos = {*vocabulary.eos_token_ids, *tokenizer.eos_token_ids}
    ends = sorted(token for token in eos if 0 <= token < size)
    if not ends:
        raise LlaisysError("the model has no token that ends an answer")
    special = sorted(token for token in tokenizer.special_ids if token < size)
    return open_tokenizer(tokens, special, ends, lambda text: tokenizer.encode(text, False))


def serve(engine: socket.socket) -> None:
    vocabulary, _ = receive(engine, Vocabulary)
    try:
        tokenizer = open_vocabulary(vocabulary)
    except Exception as error:
        send(engine, Opened(f"{error}"))
        return
    send(engine, Opened())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children
    while True:
        request, (connection, memory) = receive(engine, Compile, max_fds=2)
        if not os.fork():
            engine.close()
            grammar_process.run(tokenizer, request, socket.socket(fileno=connection), memory)
        os.close(connection)
        os.close(memory)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(EOFError):  # the engine has exited
        serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
