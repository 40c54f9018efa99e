"""report.html: all pages and claims in one self-contained file, what fails first."""

from shaped.figures.harness.report.document import Report as Report
from shaped.figures.harness.report.document import render as render
from shaped.figures.harness.report.document import write_report as write_report
