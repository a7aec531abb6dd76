"""`python -m sglang.launch_server`: the lab's stand-in, no model is computed, no GPU is used."""

import sys

from sglang.standin.main import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
