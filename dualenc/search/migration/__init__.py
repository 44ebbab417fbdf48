"""Change the embedding model of an index."""
