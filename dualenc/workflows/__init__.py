"""What people do with dualenc, as functions: they return results and never print."""
