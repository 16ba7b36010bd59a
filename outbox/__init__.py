"""outbox: what the record has written down for others, read and ticked off.

    forward      what has been queued since, for the sweep
    tail         all events as they come, none passed over
    trails       what became of jobs, many in one look
    ageing       events that are old enough to go
    removal      jobs that are removed for good, with what they owe
    relays       how far each sink of events has come
    webhooks     ends owed to jobs' own callbacks, and what came of each try
    given_up     those that were given up, found and owed once more
    receivers    webhooks of tenants: addresses that are told what happens
    spreading    from events to the messages that receivers are owed
    messages     what they are still to be told, and a log of the last tries
    tellings     ends that Celery's clients have not been told of

    tables       of relays, receivers and messages

No job changes its state here.
"""
