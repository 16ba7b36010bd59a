"""Write the reference pages: `python -m tools.reference`; with --check, print the pages that are out of date."""

import sys

from tools.reference import outdated_pages, write_pages

if sys.argv[1:] == ["--check"]:
    outdated = outdated_pages()
    sys.stdout.write("".join(f"{name}\n" for name in outdated))
    sys.exit(bool(outdated))
write_pages()
