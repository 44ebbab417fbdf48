"""Files, safe reads, checksums, decoding and the terminal."""
