"""``python -m vision_attn`` is the command line, for launchers that start modules."""

import sys

from vision_attn.cli import main

sys.exit(main())
