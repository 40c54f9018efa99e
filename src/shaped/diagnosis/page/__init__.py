"""A diagnosis as one self-contained HTML page, from its JSON."""

from shaped.diagnosis.page.document import render_page as render_page
