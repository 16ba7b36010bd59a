"""outbox: what the record has written down for others, read and ticked off.

    forward      what has been queued since, for the sweep
    tail         all events as they come, none passed over
    trails       what became of jobs, many in one look
    ageing       events that are old enough to go
    removal      jobs that are removed for good, with what they owe
    relays       how far each sink of events has come
    receivers    webhooks: addresses that are told what happens; a job's `callback_url` is one for its job alone
    spreading    from events to the messages that webhooks are owed
    messages     what all of them are still to be told, and a log of the last tries
    callbacks    messages to jobs' `callback_url`, found and owed once more
    tellings     ends that Celery's clients have not been told of

    tables       of relays, receivers and tries

No job changes its state here.
"""
