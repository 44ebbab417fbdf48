"""Files: atomic writes, safe reads, checksums, image decoding, and output for a terminal."""
