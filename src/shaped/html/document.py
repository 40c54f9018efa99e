"""The frame of a page: one file with its style in it, and a Content-Security-Policy that allows that style and nothing else."""

from __future__ import annotations

import base64
import hashlib

from shaped.html.text import to_html


def render_document(title: str, style: str, body: str, *, images: bool = False, meta: str = "") -> str:
    """The page. With `images` pictures may be shown, from data in the page alone; `meta` is HTML for the head."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    pictures = " img-src data:;" if images else ""
    policy = f"default-src 'none';{pictures} style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta name="referrer" content="no-referrer">{meta}\n<title>{to_html(title)}</title><style>{style}</style></head>\n'
        f"<body>{body}</body></html>\n"
    )
