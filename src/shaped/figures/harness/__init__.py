"""Everything around the pages: simulation, cache, claims, style, report, and the command `shaped reproduce`."""
