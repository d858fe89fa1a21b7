"""Queues and topics of AWS, made with AWS's own client and not with ours."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiobotocore.session import AioSession

from servers import MotoServer

ACCOUNT = "123456789012"
_SESSION = AioSession()  # it reads what AWS offers from files, and keeps it


@contextlib.asynccontextmanager
async def client(server: MotoServer, service: str) -> AsyncIterator[Any]:
    async with _SESSION.create_client(
        service,
        region_name="us-east-1",
        endpoint_url=server.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    ) as made:
        yield made


async def make_queue(server: MotoServer, name: str, **attributes: str) -> str:
    """The URL of a queue made now; one whose name ends in .fifo is a FIFO queue."""
    if name.endswith(".fifo"):
        attributes["FifoQueue"] = "true"
    async with client(server, "sqs") as sqs:
        made = await sqs.create_queue(QueueName=name, Attributes=attributes)
    return str(made["QueueUrl"])


async def left_in(server: MotoServer, url: str) -> int:
    """How many messages a queue holds, taken ones too."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    async with client(server, "sqs") as sqs:
        told = await sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)
    return sum(int(told["Attributes"][name]) for name in names)


async def make_redriven_queue(server: MotoServer, name: str) -> str:
    """A queue with another one for what nobody can handle."""
    await make_queue(server, f"{name}-dead")
    arn = f"arn:aws:sqs:us-east-1:{ACCOUNT}:{name}-dead"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5})
    return await make_queue(server, name, RedrivePolicy=policy)


async def make_sns_topic(
    server: MotoServer, name: str, *, queues: Sequence[str] = (), raw: bool = True
) -> str:
    """The ARN of a topic of SNS made now, with these queues as its subscribers."""
    fifo = {"FifoTopic": "true"} if name.endswith(".fifo") else {}
    async with client(server, "sns") as sns:
        arn = str((await sns.create_topic(Name=name, Attributes=fifo))["TopicArn"])
        for queue in queues:
            await sns.subscribe(
                TopicArn=arn,
                Protocol="sqs",
                Endpoint=f"arn:aws:sqs:us-east-1:{ACCOUNT}:{queue}",
                Attributes={"RawMessageDelivery": "true"} if raw else {},
            )
    return arn
