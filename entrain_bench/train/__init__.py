"""Training: programs executed on real ranks with torch.distributed and megatron-core.

Rooms, each of which imports only those before it: ``settings``, ``device`` and ``platform``; ``modules`` (parts of the
model), ``messages`` (between ranks), ``measuring``, ``running`` (a rank's work), ``launching`` (of ranks), ``trainer``.
"""
