"""Child processes: the engine of a server, the workers of an engine.

`child` starts and removes a Python child process, `channel` carries typed messages, `heartbeat`
sends the child's signs of life and `watchdog` evaluates them in the parent.
"""
