"""A server of one's own authority, which clients know by ``SSL_CERT_FILE``."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest


def own_authority(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Return a server's context for 127.0.0.1; have clients created from now on believe it."""
    key, certificate = str(folder / "key"), str(folder / "certificate")
    subject = ("-subj", "/CN=a", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    command = ("openssl", "req", "-x509", *made, "-keyout", key, "-out", certificate, *subject)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
