"""The part of FlashRecovery that lives inside a training process. The only package that imports torch.

`api` is what a script sees. Below it: `control` talks to the agent of this node, `board` holds what it said, `groups`
and the engines keep the process groups usable, `session`, `step` and `vote` wrap the training loop, `recovery` brings
this rank from a fence to the next step, `transfer` moves the state to a replacement.
"""
