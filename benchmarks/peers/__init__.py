"""The same workloads on other libraries, in an environment of their own: `make bench-peers`.

Importing this turns off what they would send to their makers, before any of them is loaded.
"""

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
