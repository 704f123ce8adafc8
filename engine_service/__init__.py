"""The engine: gRPC edge, actor, scheduler, KV cache, model, sampler and grammars.

`docs/structures.md` follows a request through these modules.
"""
