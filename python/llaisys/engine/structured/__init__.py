"""Structured output: which tokens may come next in an answer that must have a form.

A grammar is a stranger's program for a parser: it may take for ever, or all memory, or end the
process that runs it. So none is run where requests are served. Each lives in a process of its own:

    EngineCore -> StructuredRequests        which request waits for, or uses, which grammar
                      Grammar               one grammar's process, seen from the engine
                         |  a socket, and memory that both map for the masks
    tokenizer process (fork_server.py)      reads the vocabulary once, and forks
        grammar process (grammar_process.py)    checked in a limited fork first; then masks

The engine asks for the masks of a step before its forward pass and takes them after it. A mask that
is not there by then costs the others nothing: its request draws nothing in this step.
"""
