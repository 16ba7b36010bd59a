"""Repair what was missed or lost, end what is over, check the invariants.

Every function may run twice at once, late, or not at all for a while.  The tasks that call them: tasks/maintenance.py.

| task, period | function | if it does not run |
|---|---|---|
| sweep, 2 s | `sweep.Sweeper.sweep` | jobs that Redis lacks wait |
| keep_time, 1 s | `deadlines.promote_due_jobs`, `expire_deadlines` | retries and deadlines are late |
| reap, 0.5 s | `reaper.Reaper.reap`, `restore_leases.MissingLeases.restore` | jobs of silent workers hang |
| reap_killed, 0.5 s | `reaper.Reaper.reap_dead_workers` | jobs of a killed worker wait 4 s instead of 0.3 s |
| watch_runs, 2 s | `deadlines.end_overlong_runs` | overlong runs hold their slots |
| | `quarantined_slots.sync_leases` | quarantined slots are used, or never again |
| | `decommission.finish_removals` | models and servers are not removed |
| drive_batches, 2 s | `batch_control.drive_all` | batches are held, released, canceled and ended late |
| keep_nodes, 2 s | `node_connections.NodeKeeper` | nodes of a dead gateway get offers; models get no nodes |
| keep_credits, 5 s | `credits.fold_all`, `CreditAccounts.note_low` | submits of tenants with credits get slower |
| check_servers, 10 s, urgent 2 s | `server_checks.ServerChecks.apply_health` | servers that are down get offers |
| | `server_checks.ServerChecks.apply_reports` | quarantined slots stay unused |
| validate_servers, 10 s | `validation_jobs.submit_due`, `judge_answers` | servers that answer wrongly are not found |
| sync_locks, 30 s | `server_checks.ServerChecks.end_stale_runs` | stale leases of living workers stay |
| check_invariants, 60 s | `invariants.find_violations` | differences are not reported |
| reconcile, 5 min | `sweep.Sweeper.reconcile` | removed fleets stay in Redis |
| scan_dlq, 60 s | `deadlines.purge_ended_jobs` | old jobs stay in the database |

A closed queue makes no offers until it is filled again from the database (`rebuild`).  Why it was closed says what of
it is kept (routing/lua/begin_rebuild.lua):

| closed because | leases | waiting jobs | mean run times, breakers | epoch |
|---|---|---|---|---|
| Redis was emptied or restarted, or a replica promoted | from the database | enqueued again | kept | new |
| a worker has seen more offers than Redis knows | from the database | enqueued again | kept | new |
| a newer queue of the fleet was filled elsewhere | from the database | enqueued again | kept | new |
| it was filled from another database | from the database | enqueued again | deleted | new |
| a policy orders lanes by other scores now | kept, with new scores | enqueued again | kept | the same |
| jobs wait of a model that was removed or moved | kept | enqueued again | kept | the same |
| the database was restored from a backup | kept | enqueued again | kept | new |
"""
