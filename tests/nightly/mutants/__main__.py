import sys

from tests.nightly.mutants.runner import main

sys.exit(main(sys.argv[1:]))
