"""dispatch: what is done with a job, the database first and Redis after it, but where a decision says otherwise.

    dispatcher   the use cases: submit, cancel, revive
    steps        how a run starts and ends, for an event loop and for threads
    decision     how a run ends: its transition, its cost, and when its slot may be used again
    outcome      what came of a call                        verdict      what that means for the job

No Celery, Flask or HTTP in here.
"""
