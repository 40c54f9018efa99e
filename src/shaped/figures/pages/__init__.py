"""One module for each page of the report; `harness/page.py` says how to add one. No page imports another."""
