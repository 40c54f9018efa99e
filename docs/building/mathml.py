"""Formulas as MathML, which every browser draws by itself: no script, no font, no network. docutils has the converter."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)


def write_inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(convert(node))
    raise nodes.SkipNode


def write_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math-block">{convert(node, as_block=True)}</div>')
    raise nodes.SkipNode


def convert(node: nodes.Element, as_block: bool = False) -> str:
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        logger.warning("no MathML for %s: %s", node.astext(), error, location=node)
        return ""


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
