"""A local page that shows what a shaped Transformer does at initialisation, for sizes and constants that sliders choose.

The server's process never imports torch, so the page is there at once. Worker processes compute.
"""
