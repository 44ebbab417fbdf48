"""Embed a corpus, in memory or into a folder that any number of workers share."""

from dualenc.search.embed.encode import embed, tower_checksum

__all__ = ["embed", "tower_checksum"]
