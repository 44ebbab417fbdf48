"""What several test files share: small models and data, other ways to compute, servers."""
