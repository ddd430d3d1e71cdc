"""Service accounts of a real Kubernetes API server read from the cache with their own tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cache_helpers import fill, served
from tests.e2e.kubernetes import ApiServer
from tests.e2e.test_cache_tenants import asked

pytestmark = pytest.mark.real


def test_service_accounts_are_taken_for_whom_kubernetes_says_they_are(tmp_path: Path) -> None:
    api = ApiServer()
    api.service_account("vision", "train")
    api.service_account("audio", "train")
    api.service_account("stoker", "cache")
    subject = {"kind": "ServiceAccount", "name": "cache", "namespace": "stoker"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:auth-delegator"}
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    api.make(bindings, "ClusterRoleBinding", "stoker-cache", roleRef=role, subjects=[subject])
    (tmp_path / "ca.crt").write_text(api.ca)
    (tmp_path / "own").write_text(api.token("stoker", "cache"))
    (tmp_path / "access.toml").write_text(
        f"""
[kubernetes]
api_server = "{api.url}"
ca_file = "{tmp_path}/ca.crt"
token_file = "{tmp_path}/own"
audiences = ["stoker"]
[principals.vision]
rules = ["data/vision/: read"]
service_accounts = ["vision/*"]
"""
    )
    objects = fill(tmp_path / "origin", ["vision/a", "audio/b"])
    options = "--access", str(tmp_path / "access.toml")
    with served(tmp_path / "cache", {"data": str(tmp_path / "origin")}, *options) as server:
        token = api.token("vision", "train", "stoker")
        for _ in range(3):
            assert asked(server, "/data/vision/a", token) == (200, objects["vision/a"])
            assert asked(server, "/data/audio/b", token)[0] == 403
        status, body = asked(server, "/data/audio/b", api.token("audio", "train", "stoker"))
        assert (status, b"no principal here has the service account 'audio/train'" in body) == (401, True)
        for wrong in (
            api.token("vision", "train"),
            api.token("vision", "train", "another"),
            "a.b.c",
            "nonsense",
        ):
            status, body = asked(server, "/data/vision/a", wrong)
            assert (status, b"nobody vouches" in body) == (401, True), body
        # A server that may not ask says so, and takes nobody in.
        (tmp_path / "own").write_text("wrong")
        status, body = asked(server, "/data/vision/a", api.token("vision", "train", "stoker", "other"))
        assert (status, b"system:auth-delegator" in body) == (503, True), body
