"""A real Kubernetes API server for tests: the one that KUBECONFIG names, of which the caller is an administrator."""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml


class ApiServer:
    """`url`, and requests to it."""

    def __init__(self) -> None:
        path = os.environ.get("KUBECONFIG", "")
        if not path:
            pytest.skip("no Kubernetes API server: KUBECONFIG names none")
        said = yaml.safe_load(Path(path).read_text())
        cluster = said["clusters"][0]["cluster"]
        self.url: str = cluster["server"]
        self._token: str = said["users"][0]["user"]["token"]
        self.ca = base64.b64decode(cluster.get("certificate-authority-data", "")).decode() or self._its_own()

    def _its_own(self) -> str:
        """The certificates that it shows, where the file says to take any."""
        host = self.url.removeprefix("https://")
        shown = subprocess.run(
            ["openssl", "s_client", "-showcerts", "-connect", host if ":" in host else f"{host}:443"],
            input="", capture_output=True, text=True, timeout=30, check=False,
        ).stdout  # fmt: skip
        return "\n".join(re.findall(r"-----BEGIN CERT.*?-----END CERTIFICATE-----", shown, re.DOTALL))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl.create_default_context(cadata=self.ca)
        context.check_hostname = False
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return json.load(answer)

    def make(self, path: str, kind: str, name: str, **more: Any) -> None:
        """An object, if it is not there."""
        body = {"kind": kind, "metadata": {"name": name}, **more}
        try:
            self.call("POST", path, body)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise

    def service_account(self, namespace: str, name: str) -> None:
        """A service account in a namespace."""
        self.make("/api/v1/namespaces", "Namespace", namespace)
        self.make(f"/api/v1/namespaces/{namespace}/serviceaccounts", "ServiceAccount", name)

    def token(self, namespace: str, name: str, *audiences: str) -> str:
        """Of a service account."""
        spec: dict[str, Any] = {"expirationSeconds": 3600}
        if audiences:
            spec["audiences"] = list(audiences)
        said = self.call(
            "POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
            {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec},
        )  # fmt: skip
        return str(said["status"]["token"])
