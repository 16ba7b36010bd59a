--[[ model_status: how many jobs of a model wait, and what keeps them from starting.
  Keys: lanes, rules, free, leases, stats, meta
  Takes
    account: text           "<tenant>|<model>"
  Returns
    own: int, all_tenants: int      jobs that wait: of this tenant, of all
    run_ms: int | None      mean slot time of the model's latest runs; None: unknown
    free: int               free slots of the fleet
    state: text             of the model: online, draining, paused, frozen
    breaker: "closed" | "open" | "half_open" | "probing", open_until_ms: int, open_why: text      of the model
  Writes nothing
  Called by routing/queue/queues.py: Queues.model_status_command
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms
-- @include lib/rules
-- @include lib/server_stats

local model = model_of(account)
local stats = stats_key("model", model)
local breaker, run_ms = breaker_of(stats), math.ceil(get_number(stats, "run_ms"))
return { tonumber(redis.call("HGET", LANES, account) or "0"), get_number(META, "waiting:" .. model),
  run_ms > 0 and run_ms, redis.call("ZCARD", FREE), rules_of(model).state,
  breaker_state(breaker, now_ms()), breaker.until_ms, breaker.why }
