"""Child processes, for whoever needs one: the server's engine, an engine's workers.

`child` starts an interpreter that runs a module of ours, hands it its setup, and removes it with
everything it left. `channel` carries typed messages between the two. `heartbeat` is the child's
pulse, `watchdog` the parent's judgement of it. Nothing here knows what the child does.
"""
