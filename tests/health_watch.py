"""How long a server takes to say that it lives, asked a hundred times a second by a process.

    python -m tests.health_watch http://127.0.0.1:8000

It asks until its standard input ends, then prints milliseconds: the median, the 99th percentile and
the longest.
"""

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

EVERY = 0.01


def main() -> None:
    """Asks, and prints."""
    address = urlsplit(sys.argv[1])
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
    took: list[float] = []
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        took.append(1000 * (time.perf_counter() - start))
    took.sort()
    parts = {"median": len(took) // 2, "p99": int(0.99 * len(took)), "max": len(took) - 1}
    shown = {name: round(took[place], 1) for name, place in parts.items()}
    print(json.dumps({"asked": len(took)} | shown))


if __name__ == "__main__":
    main()
