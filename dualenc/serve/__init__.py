"""An index as a service over HTTP, with a page to search on."""
