"""Certificates for servers of tests."""

import shutil
import subprocess

import pytest

from servers.places import new_directory


def make_certificate() -> tuple[str, str]:
    """The files of a certificate for this machine, signed by itself, and of its key.

    They lie where servers can read them, which run as another account.
    """
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    directory = new_directory("certificates")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=localhost"
    names = ["-days", "2", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make.split(), *names], cwd=directory, check=True, capture_output=True)
    (directory / "key").chmod(0o644)
    return str(directory / "cert"), str(directory / "key")
