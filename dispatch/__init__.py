"""dispatch: what is done with a job, the record first and Redis after it.

    dispatcher   the use cases: submit, settle, cancel, revive
    outcome      what came of a call                        verdict      what that means for job, slot and server
    retry        when to try again

No Celery, Flask or HTTP in here.
"""
