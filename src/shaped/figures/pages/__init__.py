"""One module a page of the report."""
