"""tasks: who does the work.  Thin Celery shells over routing.

    from tasks import infer
    infer.delay("zimg", {"prompt": "a sunset"}).get(timeout=60)

A worker
    worker       a worker process and its runs           servers      how inference servers are spoken to
    descriptions which description a server has          vault        secrets that descriptions name
    threads      those whose failure ends the process    aside        work that keeps nobody waiting
    said         what servers say meanwhile, told on
    push, callbacks  ends that servers tell themselves

Celery
    attendance   the worker as a step of its consumer
    celery_app   the application                            inference    the task `infer`
    asking       what a call of it asks for                 telling      how its callers hear of an end
                                                         large_telling  the same of a large result
    active       what `inspect active` shows                pool         jobs to the loop, the rest to threads
    retries      when a run that went wrong is tried again
    messages, wake_up  the wake-up, and how it is known   publisher    sends it, in a thread of its own
    announce     offers and ends, told                      revoking     a revoke is a cancel
    broker, consumer, packed, queues  messages that are none, or too much

Beside the work
    maintenance  what beat, or embedded_beat, has done      rounds       servers asked for their health
    webhooks     a process of its own                       lines, berths  whose turn it is, and how many at once
    receivers    what it sends, to whom, and what comes of it
    bodies       what is said in it, and templates
    outbound     one message to a stranger's URL            keyring      keys, each for one purpose
    relay        all events, to each sink                   sinks        Redis, Kafka, NATS, AMQP, Celery's task events
    cloudevents  an event as it is published
    tracing      which trace servers and receivers go on in
    alive        what processes say of themselves          touched      the same by files, for this host
    canary       a message that each worker sends to itself
    ready        whether they can work                     ends         the line in the log for each job
    wiring       everything put together                    startup, signals  what each process does first
    config       settings

May import insight, routing and jobs; never app or flask (setup.cfg, importlinter).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.celery_app import celery
    from tasks.inference import infer
    from tasks.results import JobFailed

__all__ = ["JobFailed", "celery", "infer"]


def __getattr__(name: str) -> Any:
    # Late, so that tasks.servers can be used without Celery and settings are read when they are needed.
    if name == "celery":
        from tasks.celery_app import celery

        return celery
    if name == "infer":
        from tasks.inference import infer

        return infer
    if name == "JobFailed":
        from tasks.results import JobFailed

        return JobFailed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
