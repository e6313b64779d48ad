"""The doorbell rings at the right door, carries one id, and a role hears only its own."""

import pickle
import uuid

import pytest
import redis
from kombu.exceptions import ContentDisallowed

from core.queue import bell, ring


@pytest.fixture
def queues(servers):
    return {role: env["SLUICE_QUEUE_URL"] for role, env in servers.environments.items()}


@pytest.mark.parametrize("queue", ["train", "publish"])
def test_a_ring_reaches_the_worker_of_its_queue_as_one_id(queue, queues):
    heard = []
    app, id = bell(queue, queues[queue]), uuid.uuid4()
    ring(bell(queue, queues["service"]), f"{queue}.job", id)
    with app.connection_for_read() as connection, app.amqp.TaskConsumer(connection) as consumer:
        consumer.callbacks = [lambda body, message: (heard.append((body, message.headers)), message.ack())]
        while not any(body[0] == [str(id)] for body, _ in heard):  # others ring this bell too
            connection.drain_events(timeout=5)
    body, headers = heard[-1]
    assert body[1] == {}
    assert headers["task"] == f"{queue}.job"


@pytest.mark.parametrize(("role", "key"), [("train", "publish:publish"), ("publish", "train:train")])
def test_a_worker_can_neither_hear_nor_ring_the_other_queue(role, key, queues):
    with redis.Redis.from_url(queues[role]) as connection:
        for forbidden in (
            lambda: connection.lpush(key, "forged"),
            lambda: connection.brpop([key], timeout=1),
            lambda: connection.lrange(key, 0, -1),
            lambda: connection.delete(key),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                forbidden()


@pytest.mark.parametrize("role", ["service", "train", "publish", "sweep"])
def test_no_role_commands_the_server(role, queues):
    with redis.Redis.from_url(queues[role]) as connection:
        for forbidden in (connection.flushall, connection.config_get, connection.acl_list, connection.keys):
            with pytest.raises(redis.exceptions.NoPermissionError):
                forbidden()


def test_nobody_gets_in_without_a_password(queues):
    at = queues["train"].split("@")[1]
    with (
        redis.Redis.from_url(f"redis://{at}") as connection,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        connection.ping()


def test_a_message_that_is_not_json_is_refused_unread(queues):
    app = bell("train", queues["train"])
    app.conf.task_default_queue = f"unsafe-{uuid.uuid4().hex}"
    with app.connection_for_write() as connection:
        app.amqp.Producer(connection).publish(
            pickle.dumps("run this"),
            exchange=app.conf.task_default_queue,
            routing_key=app.conf.task_default_queue,
            declare=[app.amqp.queues[app.conf.task_default_queue]],
            content_type="application/x-python-serialize",
            content_encoding="binary",
        )
        with app.amqp.TaskConsumer(connection) as consumer:
            consumer.callbacks = [lambda body, message: None]
            with pytest.raises(ContentDisallowed):
                connection.drain_events(timeout=5)
