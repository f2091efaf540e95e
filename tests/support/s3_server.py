"""Object storage on loopback: moto's server, which speaks S3's protocol over HTTP."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@contextmanager
def s3_server(address: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """The environment variables under which `s3://bucket/…` is an empty bucket of the server.

    Args:
        address: of this machine, at which it is served.
    """
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        urlopen(Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
        yield {
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }
    finally:
        server.stop()
