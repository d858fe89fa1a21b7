"""Private instances of real servers, made to be killed.

Every server listens on a loopback port of its own, keeps its data in a temporary directory, and
dies with the process that started it. An environment variable names a running server to use
instead; such a server serves tests but cannot be killed or paused (`require_private`).
"""

from .kafka import KafkaCluster, KafkaServer
from .mariadb import MariaDBServer
from .moto import MotoServer
from .nats import NatsServer
from .outcome import Unavailable, leave_out, left_out, require_all
from .pgbouncer import PgBouncerServer
from .places import free_port
from .postgres import PostgresServer
from .rabbitmq import RabbitMQServer
from .redis import RedisServer
from .server import Server
from .standby import StandbyServer
from .webhooks import WebhookServer

__all__ = [
    "KafkaCluster",
    "KafkaServer",
    "MariaDBServer",
    "MotoServer",
    "NatsServer",
    "PgBouncerServer",
    "PostgresServer",
    "RabbitMQServer",
    "RedisServer",
    "Server",
    "StandbyServer",
    "Unavailable",
    "WebhookServer",
    "free_port",
    "leave_out",
    "left_out",
    "require_all",
]
