"""Apache Kafka in KRaft mode: the jars that `scripts/install-kafka` fetched, in one small JVM."""

import os
import re
import shutil
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from confluent_kafka.admin import AdminClient, NewTopic

from .outcome import Unavailable
from .places import free_port
from .server import Server

_JARS = Path(__file__).parents[2] / "scripts" / "kafka-jars.txt"
_JAVA = 17
_HOW = "there is no Kafka: run scripts/install-kafka, or set POSTROOM_TEST_KAFKA_URL"
_SMALL = ["-Xmx256m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
_QUIET = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]


class _Silent:
    """Takes librdkafka's own lines, so that they do not go to standard error."""

    def log(self, *_: object) -> None:
        pass


class KafkaServer(Server):
    """A broker that is its own controller, whose log survives stops and kills.

    Kafka leaves fsync to the operating system, and so do we. Topics are created by hand.
    """

    name = "Kafka"
    unprivileged = False  # it runs as root too, and the jars may lie where only root can look

    def __init__(
        self,
        *,
        url: str | None = None,
        settings: Mapping[str, str] | None = None,
        node: int = 1,
        jvm: list[str] | None = None,
    ) -> None:
        self.node = node
        self._settings = dict(settings or {})
        self._jvm = jvm or _SMALL
        self.cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        super().__init__(fsync=False, url=url)
        if url is None:
            self.controller_port = free_port()
            self.voters = f"{node}@127.0.0.1:{self.controller_port}"

    def _find_programs(self) -> None:
        self._java, self._jars = _find_java(), _find_jars()

    def _prepare(self) -> None:
        (self.directory / "server.properties").write_text(
            "".join(f"{name}={value}\n" for name, value in self._properties().items())
        )
        data = self.directory / "data"
        if not data.exists():
            data.mkdir()
            # What `kafka-storage format` writes that cannot be guessed, without a JVM of its own.
            (data / "meta.properties").write_text(
                f"version=1\ncluster.id={self.cluster_id}\nnode.id={self.node}\n"
            )

    def _properties(self) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": str(self.node),
            "controller.quorum.voters": self.voters,
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},"
            f"CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self.directory / "data"),
            "auto.create.topics.enable": "false",
            "num.partitions": "4",
            "offsets.topic.num.partitions": "3",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            # After a kill it is let in again only when its old session has ended.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            "log.index.size.max.bytes": "1048576",
            "log.cleaner.dedupe.buffer.size": "2097152",
            "num.network.threads": "2",
            "num.io.threads": "3",
            **self._settings,
        }

    def _command(self) -> list[str]:
        logs = f"-Dkafka.logs.dir={self.directory}"
        run = ["-cp", f"{self._jars}/*", "kafka.Kafka", str(self.directory / "server.properties")]
        return [self._java, *self._jvm, *_QUIET, logs, *run]

    def _own_url(self) -> str:
        return f"kafka://127.0.0.1:{self.port}"

    @property
    def bootstrap(self) -> str:
        return self.url.removeprefix("kafka://")

    def client_settings(self) -> dict[str, Any]:
        """What clients of tests are told; a subclass adds who they are."""
        return {
            "bootstrap.servers": self.bootstrap,
            "reconnect.backoff.max.ms": 200,
            "logger": _Silent(),
        }

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient(self.client_settings())

    def _ask(self) -> None:
        AdminClient(self.client_settings()).list_topics(timeout=2)

    def create_topic(
        self, name: str, *, partitions: int = 4, copies: int = 1, **config: str
    ) -> None:
        """Create a topic, its settings with _ for the dots, and wait until it is there."""
        settings = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, partitions, copies, config=settings)
        for created in self.admin.create_topics([topic], operation_timeout=20).values():
            created.result(30)


class KafkaCluster:
    """Three brokers that are their own controllers; a topic has three copies, two must agree."""

    def __init__(self) -> None:
        settings = {
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": "3",
            # A killed broker is found out soon.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "controller.quorum.election.timeout.ms": "1000",
            "controller.quorum.fetch.timeout.ms": "2000",
        }
        self.nodes = [KafkaServer(settings=settings, node=number) for number in (1, 2, 3)]
        voters = ",".join(node.voters for node in self.nodes)
        for node in self.nodes:
            node.voters, node.cluster_id = voters, self.nodes[0].cluster_id

    @property
    def url(self) -> str:
        return "kafka://" + ",".join(node.bootstrap for node in self.nodes)

    def leader_of(self, topic: str, partition: int = 0) -> KafkaServer | None:
        """The broker that leads a partition now, as one that lives says."""
        alive = next(node for node in self.nodes if node._process is not None)
        found = alive.admin.list_topics(topic, timeout=5).topics[topic].partitions
        leader = found[partition].leader if partition in found else -1
        return next((node for node in self.nodes if node.node == leader), None)

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(3) as together:  # none answers before two are there
            list(together.map(lambda node: node.start(), self.nodes))
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node._process is not None:
                node.kill()
            shutil.rmtree(node.directory, ignore_errors=True)


def _find_java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else None
    found = found or shutil.which("java")
    if found is None:
        raise Unavailable("there is no Java for Kafka: apt-get install default-jre-headless")
    said = subprocess.run([found, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < _JAVA:
        raise Unavailable(f"Kafka needs Java {_JAVA} or later, and {found} is older")
    return str(Path(found).resolve())


def _find_jars() -> Path:
    """The directory that holds every jar of the list."""
    lines = _JARS.read_text().splitlines()
    names = [line.split()[0].split(":")[1:] for line in lines if line and line[0] != "#"]
    version = next(number for artifact, number in names if artifact == "kafka_2.13")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jars = cache / "postroom" / f"kafka-{version}"
    if not all((jars / f"{artifact}-{number}.jar").is_file() for artifact, number in names):
        raise Unavailable(_HOW)
    return jars
