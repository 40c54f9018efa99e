"""One file a figure: `compute` makes the numbers, `draw` reads only those."""
