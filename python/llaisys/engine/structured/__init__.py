"""Structured output: masks of the tokens that a grammar allows next.

A grammar is untrusted input to a parser: it may run forever, exhaust memory or crash its process.
Each grammar therefore runs in a process of its own:

    EngineCore -> StructuredRequests        requests and their grammars
                      Grammar               engine side of one grammar process
                         |  a socket, and shared memory for the masks
    tokenizer process (fork_server.py)      loads the vocabulary once, and forks
        grammar process (forked)                checks the grammar in a limited fork; computes masks

The engine requests the masks of a step before its forward pass and collects them after it. A
request whose mask is late samples no token in this step; the other requests do not wait for it.
"""
