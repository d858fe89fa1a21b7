"""SQS and SNS from the `moto[server]` wheel. It keeps everything in memory: a kill forgets all."""

import sys
import urllib.request
from importlib.util import find_spec

from .outcome import Unavailable
from .server import Server


class MotoServer(Server):
    """A server that speaks as AWS does. `url` is its endpoint, `aws(scheme, name)` a broker's."""

    name = "Moto"
    unprivileged = False  # the wheel may lie where only root can look

    def __init__(self, *, url: str | None = None) -> None:
        super().__init__(fsync=False, url=url)

    def aws(self, service: str, name: str = "{topic}", more: str = "") -> str:
        return f"{service}://test:secret@us-east-1/{name}?endpoint={self.url}{more}"

    def _find_programs(self) -> None:
        if find_spec("moto") is None or find_spec("flask_cors") is None:
            raise Unavailable(
                "there is no SQS: pip install 'moto[server]', or set POSTROOM_TEST_AWS_URL"
            )

    def _prepare(self) -> None:
        pass

    def _command(self) -> list[str]:
        listen = ["-H", "127.0.0.1", "-p", str(self.port)]
        return [sys.executable, "-I", "-m", "moto.server", *listen]

    def _own_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _ask(self) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(f"{self.url}/moto-api/", timeout=5).close()
