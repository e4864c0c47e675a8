"""`python -m gradtap`: the command line where the script is not on the path."""

import sys

from gradtap.cli.app import main

sys.exit(main())
