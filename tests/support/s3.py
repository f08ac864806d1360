"""An S3 server for tests, and what a process needs to reach it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

CREDENTIALS: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "marked-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def emulated_s3() -> Iterator[str]:
    """The endpoint of an emulator in this process, until the block is left."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request otherwise
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(endpoint: str, name: str, credentials: Mapping[str, str] = CREDENTIALS) -> Any:
    """A bucket, made if it is not there; independent of the code under test."""
    session = boto3.session.Session(
        credentials["AWS_ACCESS_KEY_ID"],
        credentials["AWS_SECRET_ACCESS_KEY"],
        region_name=credentials.get("AWS_DEFAULT_REGION", "us-east-1"),
    )
    config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
    bucket = session.resource("s3", endpoint_url=endpoint, config=config).Bucket(name)
    bucket.create()
    return bucket


def fetcher_environment_for_tests() -> dict[str, str]:
    """What a fetcher process of a test gets."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **CREDENTIALS,
    }
