"""`python -m audit.cli` is `audit`."""

from audit.cli import main

main(prog_name="audit")
