"""`python -m tools.reference` writes the reference pages."""

from tools.reference import write_pages

write_pages()
