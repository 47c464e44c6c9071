"""`python -m gateway` is `headrace`."""

import sys

from gateway.cli import main

sys.exit(main())
